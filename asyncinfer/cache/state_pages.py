"""`StatePages`: pages of the layers that keep a state of a fixed size in place of KV."""

from __future__ import annotations

from typing import Final

from asyncinfer.cache.page_group import BlockTable
from asyncinfer.cache.window_pages import WindowPages

__all__ = ["STATE_WINDOW", "StatePages"]

#: A token needs what the token before it left, and nothing else: a window of the two.
STATE_WINDOW: Final = 2


class StatePages(WindowPages):
    """A page holds the state after the last computed token of its block. A sequence can therefore
    be forked only at its end: earlier states are gone, except at ends of blocks.

    A running request leaves every `interval`-th page behind for prefix hits, and gives the others
    back. Its last page is always kept, and so are pages that were hit before."""

    def __init__(self, num_pages: int, block_size: int, interval: int = 1) -> None:
        super().__init__(num_pages, STATE_WINDOW, block_size)
        self.interval = interval

    def leave(self, page: int, index: int) -> None:
        super().leave(page, index)
        if (index + 1) % self.interval and page in self.passed:
            self.drop(self.keeper[page])

    def can_fork(self, table: BlockTable, length: int, computed: int) -> bool:
        return computed == length
