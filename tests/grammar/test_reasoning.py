"""The reasoning of an answer ends by its closing tag when its budget is spent."""

from __future__ import annotations

import pytest

from asyncinfer.grammar import Reasoning

OPEN, CLOSE = "<think>", "</think>"
CLOSING = list(CLOSE.encode())


def reasoning(budget: int, prompt: str = OPEN + "\n") -> Reasoning:
    made = Reasoning(
        budget, OPEN.encode(), CLOSE.encode(), CLOSING, lambda token: bytes((token % 256,))
    )
    made.begin(list(prompt.encode()))
    return made


def closed_after(made: Reasoning, text: str) -> int | None:
    """Tokens of `text` after which the closing tag is appended."""
    for count, token in enumerate(text.encode(), 1):
        if forced := made.accept(token):
            assert list(forced) == CLOSING
            assert made.over
            assert not any(made.accept(each) for each in (OPEN + "abcdefgh").encode())
            return count
    return None


@pytest.mark.parametrize("budget", [1, 2, 17])
def test_a_prompt_that_opens_it_counts_from_the_first_token(budget: int) -> None:
    assert closed_after(reasoning(budget), "x" * 40) == budget


def test_an_answer_that_opens_it_counts_from_there() -> None:
    assert closed_after(reasoning(5, "hi"), OPEN + "x" * 40) == len(OPEN) + 5


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hi", "no reasoning at all " + OPEN + "x" * 40),
        (OPEN + "\n\n" + CLOSE + "\n\n", "x" * 40),
        (f"what does {OPEN} mean?", "x" * 40),
        (OPEN, "ab" + CLOSE + "x" * 40),
        (OPEN, "ab" + CLOSE + OPEN + "x" * 40),
        ("hi", OPEN + "a" + CLOSE + "x" * 40),
    ],
)
def test_nothing_is_appended_where_there_is_no_reasoning_or_it_has_ended(
    prompt: str, text: str
) -> None:
    # Longer than the closing tag itself, where that is written.
    assert closed_after(reasoning(12, prompt), text) is None


def test_a_closing_tag_that_has_begun_may_be_completed() -> None:
    made = reasoning(4)
    assert closed_after(made, "ab" + CLOSE + "x" * 9) is None
    assert made.over
    assert closed_after(reasoning(4), "ab</xyz") == 5
