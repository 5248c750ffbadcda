"""`BlockPool`: reference counts and the free list of KV blocks."""

from __future__ import annotations

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks `0..size-1`. A block has a count of references (uses in tables, and pins); one
    without any is either on the free list or held by the prefix cache."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.refs = [0] * size
        # Last in, first out: a page freed lately is the likeliest to be warm.
        self.free = list(range(size - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        """Take `count` blocks off the free list, one reference each."""
        assert 0 <= count <= len(self.free), "more blocks than are free"
        if not count:
            return []
        taken = self.free[: -count - 1 : -1]
        del self.free[-count:]
        for block in taken:
            self.refs[block] = 1
        return taken

    def put(self, block: int) -> None:
        """Return a block without references to the free list."""
        assert self.refs[block] == 0, "freed while in use"
        self.free.append(block)
