"""Stop strings: nothing past one is shown, nothing is held that need not be. # fault 33"""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from asyncinfer.text import StopStrings

PARTS = st.text(alphabet="abc", max_size=6)
STOPS = st.lists(PARTS.filter(bool), min_size=1, max_size=4).map(tuple)


def naive(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """What may be shown of the whole text so far, and whether it ends here."""
    matches = [text.find(stop) for stop in stops if stop in text]
    if matches:
        return text[: min(matches)], True
    for start in range(len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[:start], False
    return text, False


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


def test_a_stop_string_over_three_tokens() -> None:
    watch = StopStrings(("\n\ndef", "\nclass"))
    parts = ("return a", "\n", "\n", "d", "one", "\n", "\nde", "f b")
    pushed = [watch.push(part) for part in parts]
    assert pushed[:4] == [("return a", False), ("", False), ("", False), ("", False)]
    assert pushed[4:] == [("\n\ndone", False), ("", False), ("", False), ("", True)]


def test_without_stop_strings_everything_passes() -> None:
    assert StopStrings(()).push("text") == ("text", False)


def test_the_worst_stop_strings_cost_little_per_token() -> None:
    watch = StopStrings(tuple("a" * length + "b" for length in range(4033, 4096)))
    started = time.process_time()
    for _ in range(200):
        watch.push("aaaa" * 10)
    # 63 strings, 8,000 characters: comparing every suffix would take minutes.
    assert time.process_time() - started < 5
