"""`PagesAhead` has the system provide the memory of KV pages before a step writes there."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import torch

from asyncinfer.attention import KVCache, StateCache
from asyncinfer.scheduler import PageChanges

__all__ = ["PagesAhead", "populate"]

#: A few thousand tokens of a small model.
AHEAD: Final = 256 << 20
#: Bytes that are asked for at a time: a huge page. Whoever posts a request waits for no more.
_AT_ONCE: Final = 2 << 20
#: Linux's advice, since 5.14, to provide memory that can be written to and keeps what it holds.
_POPULATE_WRITE: Final = 23


class PagesAhead:
    """A CPU's system commits the memory of a page when it is first written to, and zeroes it then.
    That takes a tenth of a prompt's time on some virtual machines. Pages are taken in the order of
    their numbers, so the ones that come next are known, and their memory is provided while there is
    nothing else to do.

    Args:
        caches: each with its KV group's number; none on a GPU, whose memory is there from the
            start. Those of states are left out.
        ahead: bytes beyond the pages in use whose memory is provided.
    """

    def __init__(
        self, caches: Iterable[tuple[int, KVCache | StateCache]], ahead: int = AHEAD
    ) -> None:
        self._caches = [
            _Cache(group, cache) for group, cache in caches if isinstance(cache, KVCache)
        ]
        total = sum(each.page_bytes for each in self._caches)
        #: Pages of each cache that are provided beyond those in use.
        self._pages = ahead // total if total else 0
        self._parts: Iterator[tuple[int, int]] = iter(())

    def used(self, groups: Sequence[PageChanges]) -> None:
        """Note the pages that a step's tables have grown by."""
        for each in self._caches:
            grown = groups[each.group].grown if groups else ()
            each.used = max(each.used, 1 + max((page for *_, page in grown), default=-1))

    def provide(self) -> bool:
        """Provide a little more; False if there is nothing left to do for now."""
        part = next(self._parts, None)
        if part is None:
            self._parts = self._next_parts()
            part = next(self._parts, None)
        if part is None:
            return False
        if not populate(*part):
            self._caches, self._parts = [], iter(())
            return False
        return True

    def _next_parts(self) -> Iterator[tuple[int, int]]:
        """The addresses and bytes of some more pages, in every layer, where any are due."""
        for each in self._caches:
            end = min(each.used + self._pages, each.count)
            first = max(each.used, each.provided)
            if first < end:
                each.provided = min(end, first + each.at_once)
                return each.parts(first, each.provided)
        return iter(())


class _Cache:
    """What of a cache's pages is in use and provided."""

    def __init__(self, group: int, cache: KVCache) -> None:
        self.group = group
        self.used = self.provided = 0
        self.count = cache.num_blocks
        #: Of each tensor, each layer's keys and values: `[pages, kv_heads, block_size, width]`.
        self._regions = [
            part
            for tensor in cache.tensors
            for layer in tensor
            for part in layer
            if part.numel() and part.is_contiguous()
        ]
        self.page_bytes = sum(map(_page_bytes, self._regions))
        most = max(map(_page_bytes, self._regions), default=1)
        #: Pages that are provided together.
        self.at_once = max(1, _AT_ONCE // most)

    def parts(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        for region in self._regions:
            size = _page_bytes(region)
            yield region.data_ptr() + first * size, (end - first) * size


def _page_bytes(region: torch.Tensor) -> int:
    return region[0].numel() * region.itemsize


def _find() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    try:
        advise: Callable[..., int] = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return None
    return advise


_advise = _find()


def populate(address: int, nbytes: int) -> bool:
    """Have the system provide the memory of so many bytes; False where it does not do so."""
    if _advise is None:
        return False
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = address + nbytes - first
    return _advise(ctypes.c_void_p(first), ctypes.c_size_t(size), _POPULATE_WRITE) == 0
