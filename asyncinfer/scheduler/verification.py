"""Which tokens an answer goes on with, after a row that may have computed drafted tokens."""

from __future__ import annotations

from collections import abc

from asyncinfer.scheduler.sequence import Sequence

__all__ = ["agreed", "verified"]


def verified(
    sequence: Sequence, draft: abc.Sequence[int], draws: abc.Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """The tokens that the sequence has from now on, one at least; and how many tokens of the draft
    are among them and have their KV, so that the next row begins after those.

    A draw is what the sequence would have drawn without a draft, as long as every token before it
    is right: its random numbers are keyed on seed and position. So a drafted token is right exactly
    if it was drawn, or has to follow by the grammar, and the draw after it stands.

    Args:
        draws: at the position of each drafted token, and at the one after them; fewer where a later
            one cannot be used.

    Raises `RequestFailed` where a token does not fit the grammar.
    """
    room = sequence.max_total - len(sequence.tokens)
    known = len(sequence.tokens) - sequence.prompt_len
    new: list[int] = []
    right = 0
    ended = False
    while not ended and len(new) == right and right < len(draws):
        begun = len(new)
        for each in _followed(sequence, draws[begun], room - begun):
            new.append(each)
            early = known + len(new) < sequence.params.min_tokens
            if each in sequence.stop_ids and not early:
                ended = True
                break
        if not ended:
            new += _closing(sequence, new[begun:], room - len(new))
            ended = sequence.matcher is not None and sequence.matcher.complete
        while right < min(len(draft), len(new)) and draft[right] == new[right]:
            right += 1
    return tuple(new), agreed(draft, new)


def agreed(draft: abc.Sequence[int], new: abc.Sequence[int]) -> int:
    """How many drafted tokens are among the new tokens of a sequence and have their KV. The next
    row draws after the last new token."""
    right = 0
    while right < min(len(draft), len(new) - 1) and draft[right] == new[right]:
        right += 1
    return right


def _followed(sequence: Sequence, token: int, room: int) -> abc.Sequence[int]:
    """The token and those that the grammar makes follow it, at most `room` in all."""
    if sequence.matcher is None:
        return (token,)
    return (token, *sequence.matcher.accept(token, room - 1))


def _closing(sequence: Sequence, new: abc.Sequence[int], room: int) -> list[int]:
    """The tokens that end the reasoning after these, where its budget is spent; `room` at most."""
    closing: list[int] = []
    if sequence.reasoning is not None:
        # A grammar forces nothing within the reasoning, so that what follows comes last.
        for token in new:
            for each in sequence.reasoning.accept(token)[: room - len(closing)]:
                closing.append(each)
                if sequence.matcher is not None:
                    sequence.matcher.accept(each, 0)
    return closing
