"""`PromptLookup`: what followed the last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncinfer.params import check_integer
from asyncinfer.protocols import DraftRequest
from asyncinfer.speculation.packed_tokens import PackedTokens

__all__ = ["PromptLookup"]

#: Only so many of the last tokens are searched: 256 KiB, which take some 100 us.
_SEARCHED: Final = 1 << 16


class PromptLookup:
    """Guesses that a text goes on as it did where its last tokens stood before, in the prompt or in
    the answer (prompt lookup decoding, Saxena 2023). Good where answers quote: edits, summaries,
    retrieval.

    Args:
        longest, shortest: tokens that have to be alike. The longer run is looked for first.
    """

    def __init__(self, longest: int = 6, shortest: int = 3) -> None:
        self._longest = check_integer("longest", longest, 1, 64)
        self._shortest = check_integer("shortest", shortest, 1, self._longest)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        return [self._propose(request) for request in requests]

    def end(self, request: DraftRequest) -> None:
        request.state = None

    def _propose(self, request: DraftRequest) -> Sequence[int]:
        known: PackedTokens = request.state or PackedTokens()
        request.state = known
        known.extend(request.tokens(len(known)))
        count = len(known)
        for length in dict.fromkeys((self._longest, self._shortest)):
            if length >= count:
                continue
            run = known.slice(count - length, count)
            at = known.last(run, count - _SEARCHED, count - 1)
            if at >= 0:
                return _repeated(known.slice(at + length, at + length + request.most), request.most)
        return ()


def _repeated(tokens: list[int], most: int) -> list[int]:
    """`tokens`, repeated up to `most`: where a run reaches the end of the text, the text loops."""
    return (tokens * -(-most // len(tokens)))[:most] if tokens else tokens
