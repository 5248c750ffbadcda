"""A text ends before the first match of a regular expression, however it is cut into pieces."""

from __future__ import annotations

import random
import re
import time

import pytest

from asyncinfer import InvalidRequest
from asyncinfer.bounds import MAX_STOP_REGEX_SPAN
from asyncinfer.grammar import StopRegex, compile_stop
from asyncinfer.text import StopChain, StopStrings

PATTERNS = [
    ("ab",),
    ("a+b",),
    ("a[ab]{0,5}1",),
    (r"\n\n(User|Human):", "1 1"),
    ("(a|ab)(1|b1)", "bb a"),
    ("a.*b",),
    ("é[ab]|ü",),
]


def first_match(patterns: tuple[str, ...], text: str, least: int = 0) -> tuple[int, int] | None:
    """By trying: the match that ends first, and of those the leftmost."""
    either = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    for end in range(1, len(text) + 1):
        for start in range(max(0, end - MAX_STOP_REGEX_SPAN), end):
            if end > least and either.fullmatch(text, start, end):
                return start, end
    return None


def pushed(stop: StopRegex | StopChain, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        text, found = stop.push(piece)
        shown += text
        if found is not None:
            return shown, found
    return shown + stop.flush(), None


def cut(chooser: random.Random, text: str) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = chooser.randint(1, 6)
        pieces.append(text[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("patterns", PATTERNS)
def test_the_text_ends_where_trying_finds_the_first_match(patterns: tuple[str, ...]) -> None:
    chooser = random.Random(1)
    program = compile_stop(patterns)
    found = 0
    for _ in range(60):
        text = "".join(chooser.choices("aab1 éü\nUser:", k=chooser.randint(0, 40)))
        if chooser.random() < 0.3:
            text += "\n\nUser: b"
        match = first_match(patterns, text)
        pieces = cut(chooser, text)
        if match is None:
            assert pushed(StopRegex(program), pieces) == (text, None)
            continue
        found += 1
        start, end = match
        assert pushed(StopRegex(program), pieces) == (text[:start], text[start:end])
        included = pushed(StopRegex(program, include=True), pieces)
        assert included == (text[:end], text[start:end])
    assert found > 5


def test_only_what_can_begin_a_match_is_held_back() -> None:
    stop = StopRegex(compile_stop(("foo[0-9]+;",)))
    assert stop.push("a fo") == ("a ", None)
    assert stop.push("f") == ("fo", None)
    assert stop.push("oo12") == ("", None)
    assert stop.push("x") == ("foo12x", None)
    assert stop.push("foo7") == ("", None)
    assert stop.flush() == "foo7"


def test_a_match_that_does_not_count_yet() -> None:
    stop = StopRegex(compile_stop(("ab",)))
    assert stop.push("ab", False) == ("ab", None)
    assert stop.push("xa", False) == ("x", None)
    assert stop.push("b") == ("", "ab")


def test_a_match_is_bounded_and_so_is_what_is_held_back() -> None:
    span = MAX_STOP_REGEX_SPAN
    program = compile_stop(("a(.|\\n)*z",))
    stop = StopRegex(program)
    shown, found = stop.push("a" + "b" * (span - 2))
    assert (shown, found) == ("", None)
    assert stop.push("z") == ("", "a" + "b" * (span - 2) + "z")
    stop = StopRegex(program)
    shown, found = stop.push("a" + "b" * (span - 1))
    assert shown
    assert (shown + stop.push("z")[0], found) == ("a" + "b" * (span - 1) + "z", None)
    # One that goes on begins again where its automata do.
    stop = StopRegex(compile_stop(("ab{3}c",)))
    for _ in range(700):
        assert not stop.push("ab b" * 32)[1]
    assert stop.push("abb")[0] == ""
    assert stop.push("bc") == ("", "abbbc")


def test_with_stop_strings_the_first_of_both_ends_the_text() -> None:
    def both() -> StopChain:
        return StopChain(StopStrings(("END", "x9")), StopRegex(compile_stop(("x[0-9]{2}",))))

    assert pushed(both(), ["one EN", "D x12"]) == ("one ", "END")
    assert pushed(both(), ["one x", "12 END"]) == ("one ", "x12")
    assert pushed(both(), ["one x", "9"]) == ("one ", "x9")
    assert pushed(both(), ["one x1", " E"]) == ("one x1 E", None)
    # What the other one held back is text before the stop.
    assert pushed(both(), ["one x1", "END"]) == ("one x1", "END")


@pytest.mark.parametrize("pattern", ["(", "a*", "[b-a]", "(a?){0,60}", "^a", "a$", r"b|a\z"])
def test_a_bad_expression_is_refused_quickly(pattern: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="stop_regex"):
        compile_stop((pattern,))
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("pattern", ["END$", "^a", r"b|\Aa", "(?x)a # b"])
def test_what_holds_for_a_whole_text_alone_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compile_stop(("x", pattern))
    assert str(refused.value) == (
        f"stop_regex={pattern!r}: must have no anchor, such as ^ or $, and no comment at its end"
    )


@pytest.mark.parametrize("pattern", ["[", ")", "a)|(b", "(?=x)a", "$a"])
def test_an_error_shows_the_expression_that_was_given(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="invalid regex") as refused:
        compile_stop(("x", pattern))
    assert refused.value.value == pattern
    assert "(?:" not in str(refused.value)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+b", "(.*a){9}b", "a[ab]{0,250}c"])
def test_an_expression_that_explodes_elsewhere_takes_bounded_time(pattern: str) -> None:
    stop = StopRegex(compile_stop((pattern,)))
    began = time.process_time()
    for _ in range(100):
        assert not stop.push("a" * 20 + "!")[1]
    assert time.process_time() - began < 2.0
