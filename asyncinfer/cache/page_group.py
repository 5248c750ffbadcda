"""KV groups: layers with the same needs share pages, a pool and a table per sequence.

A *block* is `block_size` tokens of a sequence. A *page* holds one group's KV of a block. The first
group sees every token, so a block's number is its page there; the prefix cache knows blocks by that
number. Where no layer sees everything, the first group has no layers, and its pages no bytes.

Every other group says which of its pages a token needs, and keeps pages of published blocks as long
as it has room. A prefix hit ends where every group can serve it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncinfer.cache.entry import CacheEntry
from asyncinfer.cache.page_pool import PagePool

__all__ = ["BlockTable", "DependentGroup", "KVGroupSpec", "PageGroup"]


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """What a runner holds of one group."""

    num_pages: int
    #: Tokens that a token sees, itself among them; None: all before it. `STATE_WINDOW` with
    #: `state`.
    window: int | None = None
    #: The model's layers in it, in order.
    layers: tuple[int, ...] = ()
    #: Whether its layers keep a state in place of KV: see `StatePages`.
    state: bool = False
    #: Of a state group: the page of every so many blocks is kept for prefix hits, see `StatePages`.
    interval: int = 1


@dataclass(slots=True)
class BlockTable:
    """A request's pages of one group."""

    #: The page of each block, in order; -1 for the blocks before `first_live_page`.
    pages: list[int]
    #: The first block whose page the request still needs.
    first_live_page: int = 0

    @property
    def live(self) -> list[int]:
        """The pages that the request holds."""
        return self.pages[self.first_live_page :]

    @property
    def held(self) -> int:
        """How many they are."""
        return len(self.pages) - self.first_live_page


class PageGroup(Protocol):
    """Pages of one group. Callers check `available` before they take any."""

    @property
    def pool(self) -> PagePool: ...

    @property
    def steady(self) -> int:
        """Most pages that a decoding request holds while one step is in flight."""

    @property
    def available(self) -> int:
        """Pages that can be taken: free, or cached."""

    @property
    def cached(self) -> int:
        """Pages without references that are kept for published blocks."""

    def first(self, position: int) -> int:
        """The first block whose page a token at `position` needs."""

    def usable(self, entries: Sequence[CacheEntry]) -> int:
        """The most of these leading blocks after which a token finds all it needs."""

    def pages(self, entries: Sequence[CacheEntry]) -> list[int]:
        """The pages that a token after `usable` entries needs, for as many of the last entries."""

    def take(self, count: int) -> list[int]:
        """Take pages for `count` blocks, one reference each."""

    def hold(self, pages: Iterable[int]) -> None:
        """One more reference to each page."""

    def release(self, page: int, *, passing: bool = False) -> None:
        """One reference less; `passing`: of a request that goes on."""


class DependentGroup(PageGroup, Protocol):
    """A group other than the first. Blocks are numbered by pages of the first group, so this group
    itself keeps the pages of published blocks."""

    def can_fork(self, table: BlockTable, length: int, computed: int) -> bool:
        """Whether a request of which `computed` tokens are written or will be still has all that a
        token after its first `length` ones needs."""

    def leave(self, page: int, index: int) -> None:
        """`release`, for a request that goes on; `index`: the page's place in its block table."""

    def keep(self, block: int, page: int, *, again: bool) -> None:
        """A referenced page is written, and the block is published: keep it for the block, unless
        either has another. `again`: the block had been published before."""

    def drop(self, block: int) -> None:
        """The block is published no more, and keeps its page no longer, if it has one."""
