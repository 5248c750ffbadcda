"""Stop strings: nothing past one is shown, nothing is held that need not be. # fault 33"""

from __future__ import annotations

import tracemalloc
from sys import getsizeof

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import lines_run

from asyncinfer.text import StopStrings, stop

PARTS = st.text(alphabet="abc", max_size=6)
STOPS = st.lists(PARTS.filter(bool), min_size=1, max_size=4).map(tuple)


def naive(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """What may be shown of the whole text so far, and the stop string that ends it here."""
    found = min((stop for stop in stops if stop in text), key=text.find, default=None)
    if found is not None:
        return text[: text.find(found)], found
    for start in range(len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[:start], None
    return text, None


@given(stops=STOPS, parts=st.lists(PARTS, max_size=10))
def test_like_a_search_of_the_whole_text(stops: tuple[str, ...], parts: list[str]) -> None:
    watch = StopStrings(stops)
    text = shown = ""
    for part in parts:
        text += part
        delta, found = watch.push(part)
        shown += delta
        assert (shown, found) == naive(stops, text)
        if found:
            assert watch.flush() == ""
            return
    assert shown + watch.flush() == text
    assert watch.flush() == ""


@given(stops=STOPS, early=st.lists(PARTS, max_size=6), parts=st.lists(PARTS, max_size=6))
def test_what_is_complete_early_does_not_count_and_what_began_early_does(
    stops: tuple[str, ...], early: list[str], parts: list[str]
) -> None:
    watch = StopStrings(stops)
    text = shown = ""
    for part, ends in [*((part, False) for part in early), *((part, True) for part in parts)]:
        before, text = len(text), text + part
        delta, found = watch.push(part, ends)
        shown += delta
        starts = [
            start
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        assert (found is not None) == bool(ends and starts)
        if found is not None:
            assert shown == text[: min(starts)]
            assert text.startswith(found, min(starts))
            return
        # Held back is what may begin one, and nothing else.
        rest = text[len(shown) :]
        assert text.startswith(shown)
        assert not rest or any(stop.startswith(rest) and stop != rest for stop in stops)
        assert not any(
            len(stop) > len(longer) and stop.startswith(longer)
            for stop in stops
            for longer in [text[start:] for start in range(len(shown))]
        )
    assert shown + watch.flush() == text


def test_a_stop_string_over_three_tokens() -> None:
    watch = StopStrings(("\n\ndef", "\nclass"))
    parts = ("return a", "\n", "\n", "d", "one", "\n", "\nde", "f b")
    pushed = [watch.push(part) for part in parts]
    assert pushed[:4] == [("return a", None), ("", None), ("", None), ("", None)]
    assert pushed[4:] == [("\n\ndone", None), ("", None), ("", None), ("", "\n\ndef")]


def test_without_stop_strings_everything_passes() -> None:
    assert StopStrings(()).push("text") == ("text", None)


def test_the_worst_stop_strings_cost_little_per_character() -> None:
    stops = tuple("a" * length + "b" for length in range(4088, 4096))
    text = "aaaa" * 10
    watch = StopStrings(stops)
    count = lines_run(lambda: [watch.push(text) for _ in range(200)], stop.__file__)
    # Ten lines per character and stop string; comparing every suffix takes hundreds.
    assert 0 < count < 20 * (200 * len(text) * len(stops))


@pytest.mark.parametrize("last", ["b", "\N{GRINNING FACE}"])
def test_many_texts_hold_what_is_charged_for_them(last: str) -> None:
    """The worst strings repeat themselves, and the text goes as far as it can."""
    stops = tuple("a" * length + last for length in range(992, 1024))
    texts, text = 16, "a" * 2000
    tracemalloc.start()
    try:
        first = StopStrings(stops)
        watches = [first.another() for _ in range(texts)]
        assert all(watch.push(text) == ("a" * 977, None) for watch in watches)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    charged = StopStrings.held_bytes(stops, texts) - sum(map(getsizeof, stops))
    assert charged / 2 < held < charged


@given(stops=STOPS, texts=st.lists(st.lists(PARTS, max_size=6), min_size=2, max_size=4))
def test_texts_that_share_their_tables_are_watched_apart(
    stops: tuple[str, ...], texts: list[list[str]]
) -> None:
    first = StopStrings(stops)
    watches = [first.another() for _ in texts]
    ended: list[str | None] = [None] * len(texts)
    shown = [""] * len(texts)
    for at in range(max(map(len, texts))):
        for index, (watch, parts) in enumerate(zip(watches, texts, strict=True)):
            if at < len(parts) and ended[index] is None:
                delta, ended[index] = watch.push(parts[at])
                shown[index] += delta
                assert (shown[index], ended[index]) == naive(stops, "".join(parts[: at + 1]))
