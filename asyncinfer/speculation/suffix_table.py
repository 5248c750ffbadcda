"""`SuffixTable`: what followed the last tokens wherever they stood before, in any answer."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from secrets import token_bytes
from typing import Final

import numpy as np
import numpy.typing as npt

from asyncinfer.params import check_integer
from asyncinfer.protocols import DraftRequest

__all__ = ["SuffixTable"]

U64 = npt.NDArray[np.uint64]

#: Tokens of the runs that are looked up, the longest first.
_RUNS: Final = (12, 6, 3)
#: Of the polynomial whose value names a run (Knuth's multiplier of linear congruences).
_FACTOR: Final = 6364136223846793005
_MIX: Final = 0xFF51AFD7ED558CCD
_MASK: Final = (1 << 64) - 1
#: Tokens that one call learns of a request: of a prompt that is longer, the last ones.
_LEARNED: Final = 1 << 12
#: So many are entered one by one; more are entered together.
_FEW: Final = 16


class SuffixTable:
    """Guesses that a text goes on as the last one did in which its last tokens stood: this request,
    or an earlier one of the same `cache_scope`. Good where answers resemble each other: agents that
    call the same tools, forms, code of one project.

    One table of hashes holds a suffix tree's nodes of three depths: the token that followed a run
    of 12, 6 or 3 tokens last. Its memory is fixed, since the newest entry of a place replaces the
    one before. Two runs of one hash give a wrong guess, and never a wrong answer.

    Args:
        entries: of the table, of 12 bytes each, and as many as fit into a power of two. A token of
            a text takes up to three.
    """

    def __init__(self, entries: int = 1 << 19) -> None:
        bits = check_integer("entries", entries, 1 << 10, 1 << 28).bit_length() - 1
        self._shift = 64 - bits
        self._key = token_bytes(16)
        self._names: U64 = np.zeros(1 << bits, np.uint64)
        self._following: npt.NDArray[np.int32] = np.zeros(1 << bits, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._names.nbytes + self._following.nbytes

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        # All are learned first, so that each request finds the tokens of the others, too.
        for request in requests:
            self._learn(request)
        return [self._propose(request) for request in requests]

    def end(self, request: DraftRequest) -> None:
        self._learn(request)
        request.state = None

    def _learn(self, request: DraftRequest) -> None:
        """Enter the tokens that came since the last call."""
        read, scope = request.state or (0, self._number(request.scope))
        first = max(0, read - _RUNS[0], request.length - _LEARNED)
        known, read = request.tokens(first), max(0, read - first)
        if len(known) - read > _FEW:
            self._enter_all(np.array(known, np.uint64), read, scope)
        else:
            for end in range(read, len(known)):
                for run in _RUNS:
                    if run <= end:
                        name = _name(known[end - run : end], scope)
                        at = _mixed(name) >> self._shift
                        self._names[at], self._following[at] = name, known[end]
        request.state = request.length, scope

    def _enter_all(self, tokens: U64, read: int, scope: int) -> None:
        """Enter what `tokens` from `read` on follow."""
        for run in _RUNS:
            known = tokens[max(0, read - run) :]
            count = len(known) - run
            if count > 0:
                names = np.full(count, scope + run, np.uint64)
                for place in range(run):
                    names = names * np.uint64(_FACTOR) + known[place : place + count] + np.uint64(1)
                mixed = (names ^ (names >> np.uint64(33))) * np.uint64(_MIX)
                at = (mixed ^ (mixed >> np.uint64(33))) >> np.uint64(self._shift)
                self._names[at] = names
                self._following[at] = known[run:].astype(np.int32)

    def _propose(self, request: DraftRequest) -> list[int]:
        _, scope = request.state
        known = request.tokens(max(0, request.length - _RUNS[0]))
        draft: list[int] = []
        while len(draft) < request.most:
            token = self._after(known, scope)
            if token < 0:
                break
            draft.append(token)
            known.append(token)
        return draft

    def _after(self, known: list[int], scope: int) -> int:
        """What followed the longest run that was seen before; -1: none was."""
        for run in _RUNS:
            if run <= len(known):
                name = _name(known[-run:], scope)
                at = _mixed(name) >> self._shift
                if int(self._names[at]) == name:
                    return int(self._following[at])
        return -1

    def _number(self, scope: str) -> int:
        """A secret number that begins the names of a scope's runs, so that scopes share none."""
        digest = blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=7, key=self._key)
        return int.from_bytes(digest.digest(), "little")


def _name(run: list[int], scope: int) -> int:
    """The 64 bits by which the table knows a run."""
    name = scope + len(run)
    for token in run:
        name = (name * _FACTOR + token + 1) & _MASK
    return name


def _mixed(name: int) -> int:
    """A number whose high bits depend on all bits of the name (a step of MurmurHash3)."""
    mixed = ((name ^ name >> 33) * _MIX) & _MASK
    return mixed ^ mixed >> 33
