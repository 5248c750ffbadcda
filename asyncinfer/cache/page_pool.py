"""`PagePool`: reference counts and the free list of one group's pages."""

from __future__ import annotations

__all__ = ["PagePool"]


class PagePool:
    """Pages `0..size-1`. A page has a count of references (uses in tables, and as the source of a
    copy); one without any is either on the free list or kept for a published block."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.refs = [0] * size
        # Last in, first out: a page freed lately is the likeliest to be warm.
        self.free = list(range(size - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        """Take `count` pages off the free list, one reference each."""
        assert 0 <= count <= len(self.free), "more pages than are free"
        if not count:
            return []
        taken = self.free[: -count - 1 : -1]
        del self.free[-count:]
        for page in taken:
            self.refs[page] = 1
        return taken

    def put(self, page: int) -> None:
        """Return a page without references to the free list."""
        assert self.refs[page] == 0, "freed while in use"
        self.free.append(page)
