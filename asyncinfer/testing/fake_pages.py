"""`FakePages`: the KV pages of a `FakeRunner`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from asyncinfer.scheduler import RunnerSpec
from asyncinfer.testing.fake_slots import FakeSlots
from asyncinfer.testing.oracle import A, mix

__all__ = ["FakePages", "mix_each"]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class FakePages:
    """KV, and digests beside it, in pages that are found through the slots' block tables. A digest
    is the sum of all KV up to its position, each with a weight of its own. New pages hold garbage.
    """

    def __init__(self, spec: RunnerSpec, slots: FakeSlots) -> None:
        self._size = spec.block_size
        self._slots = slots
        self._tables = slots.tables[0]
        garbage = mix_each(np.arange(2 * spec.num_blocks * self._size, dtype=np.uint64))
        self._entries, self._digest = garbage.reshape(2, spec.num_blocks, self._size)
        self._spoiled = 0
        self._weights: U64 = mix_each(np.arange(spec.max_context, dtype=np.uint64)) | np.uint64(1)
        self._powers = _powers(spec.max_step_tokens)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._entries[target] = self._entries[source]
            self._digest[target] = self._digest[source]

    def spoil(self, slot: int, start: int, count: int) -> None:
        """Put garbage in place of what a row stored."""
        self._spoiled += 1
        self._entries[self._at(slot, np.arange(start, start + count))] = mix(self._spoiled)

    def read(self, slots: I64, starts: I64) -> tuple[U64, U64]:
        """KV and digest before each row's first token."""
        where = self._at(slots, np.maximum(starts - 1, 0))
        first = starts == 0
        kv = self._entries[where]
        kv[first] = 0
        digest = self._digest[where]
        digest[first] = 0
        return kv, digest

    def decode(self, slots: I64, positions: I64, kv: U64, digest: U64) -> U64:
        """Compute rows of one token each; returns their digests."""
        tokens = self._slots.history[slots, positions].astype(np.uint64)
        kv = kv * np.uint64(A) + mix_each(tokens + np.uint64(1))
        digest = digest + kv * self._weights[positions]
        where = self._at(slots, positions)
        self._entries[where], self._digest[where] = kv, digest
        return digest

    def prefill(
        self, slot: int, start: int, count: int, kv: np.uint64, digest: np.uint64
    ) -> np.uint64:
        """Compute a row of any length; returns the digest of its last token."""
        tokens = self._slots.history[slot, start : start + count].astype(np.uint64)
        up, down = self._powers[0][:count], self._powers[1][:count]
        chunk = up * (kv + np.cumsum(mix_each(tokens + np.uint64(1)) * down, dtype=np.uint64))
        return self.write(slot, start, chunk, digest)

    def write(self, slot: int, start: int, chunk: U64, digest: np.uint64) -> np.uint64:
        """Store the KV of a row; returns the digest of its last token."""
        end = start + len(chunk)
        digests = digest + np.cumsum(chunk * self._weights[start:end], dtype=np.uint64)
        where = self._at(slot, np.arange(start, end))
        self._entries[where], self._digest[where] = chunk, digests
        return np.uint64(digests[-1])

    def _at(self, slots: I64 | int, positions: I64) -> tuple[I64, I64]:
        pages: I64 = self._tables[slots, positions // self._size]
        return pages, positions % self._size


def mix_each(x: U64) -> U64:
    """`mix` of every element."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _powers(count: int) -> tuple[U64, U64]:
    """A**1 .. A**count and their inverses."""
    inverse = pow(A, -1, 2**64)
    up = np.cumprod(np.full(count, A, np.uint64), dtype=np.uint64)
    down = np.cumprod(np.full(count, inverse, np.uint64), dtype=np.uint64)
    return up, down
