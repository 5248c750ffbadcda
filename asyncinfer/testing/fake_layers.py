"""The layers of the fake model: one that sees everything, and one for each window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from asyncinfer.scheduler import RunnerSpec
from asyncinfer.testing.fake_pages import FakePages
from asyncinfer.testing.fake_slots import FakeSlots
from asyncinfer.testing.oracle import A, WindowSum

__all__ = ["FullLayer", "WindowLayer", "mix_each"]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class FullLayer(FakePages):
    """KV, and digests beside it. A digest is the sum of all KV up to its position, each with a
    weight of its own."""

    def __init__(self, spec: RunnerSpec, slots: FakeSlots) -> None:
        self._digest: U64 = np.empty((spec.num_blocks, spec.block_size), np.uint64)
        super().__init__(spec, slots, 0)
        self._weights: U64 = mix_each(np.arange(spec.max_context, dtype=np.uint64)) | np.uint64(1)
        self._powers = _powers(spec.max_step_tokens)

    def poison(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().poison(pages)
        for page in pages:
            self._digest[page] = self._garbage()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().copy(pairs)
        for source, target in pairs:
            self._digest[target] = self._digest[source]

    def read(self, slots: I64, starts: I64, *, strict: bool) -> tuple[U64, U64]:
        """KV and digest before each row's first token. `strict`: the digest anew, from the KV of
        all tokens before it."""
        where = self._at(slots, np.maximum(starts - 1, 0))
        first = starts == 0
        kv = self._entries[where]
        kv[first] = 0
        if strict:
            digest = np.array([self._sum(s, n) for s, n in zip(slots, starts, strict=True)])
        else:
            digest = self._digest[where]
            digest[first] = 0
        return kv, digest

    def decode(self, slots: I64, positions: I64, kv: U64, digest: U64) -> U64:
        """Rows of one token each; their digests."""
        tokens = self._slots.history[slots, positions].astype(np.uint64)
        kv = kv * np.uint64(A) + mix_each(tokens + np.uint64(1))
        digest = digest + kv * self._weights[positions]
        where = self._at(slots, positions)
        self._entries[where], self._digest[where] = kv, digest
        return digest

    def prefill(
        self, slot: int, start: int, count: int, kv: np.uint64, digest: np.uint64
    ) -> np.uint64:
        """A row of any length; the digest of its last token."""
        tokens = self._slots.history[slot, start : start + count].astype(np.uint64)
        up, down = self._powers[0][:count], self._powers[1][:count]
        chunk = up * (kv + np.cumsum(mix_each(tokens + np.uint64(1)) * down, dtype=np.uint64))
        return self.write(slot, start, chunk, digest)

    def write(self, slot: int, start: int, chunk: U64, digest: np.uint64) -> np.uint64:
        """Store the KV of a row; the digest of its last token."""
        end = start + len(chunk)
        digests = digest + np.cumsum(chunk * self._weights[start:end], dtype=np.uint64)
        where = self._at(slot, np.arange(start, end))
        self._entries[where], self._digest[where] = chunk, digests
        return np.uint64(digests[-1])

    def _sum(self, slot: int, length: int) -> np.uint64:
        pages = self._tables[slot, : -(-length // self._size)]
        kv = self._entries[pages].reshape(-1)[:length]
        return np.uint64((kv * self._weights[:length]).sum(dtype=np.uint64))


class WindowLayer(FakePages):
    """Only entries that the window shows are read, and each of them matters."""

    def __init__(self, spec: RunnerSpec, slots: FakeSlots, group: int, window: int) -> None:
        super().__init__(spec, slots, group)
        self._window = window

    def read(self, slot: int, start: int) -> WindowSum:
        """A row's window before its first token."""
        seen = self._at(slot, np.arange(max(0, start - self._window + 1), start))
        return WindowSum(self._window, start, self._entries[seen].tolist())

    def write(self, slot: int, start: int, entries: Sequence[int]) -> None:
        """Store what the layer has of a row."""
        where = self._at(slot, np.arange(start, start + len(entries)))
        self._entries[where] = np.array(entries, np.uint64)

    def _at(self, slots: I64 | int, positions: I64) -> tuple[I64, I64]:
        where = super()._at(slots, positions)
        assert (where[0] >= 0).all(), f"slot {slots} lacks a page of group {self._group}"
        return where


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
