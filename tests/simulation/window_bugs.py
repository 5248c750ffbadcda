"""Bugs in the pages of layers with a window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulation.cache_bugs import unpinned
from simulation.planted import Plant, afterwards, beforehand, instead, nothing, result, together

from asyncinfer.cache import BlockManager, WindowPages
from asyncinfer.scheduler import Step
from asyncinfer.scheduler.slot_allocator import SlotAllocator

__all__ = ["WINDOW_BUGS"]


def trim_in_flight(trim: Any) -> Any:
    def substitute(blocks: BlockManager, sequence: Any, length: int) -> None:
        trim(blocks, sequence, max(length, sequence.computed))

    return substitute


def uncounted(pages: WindowPages, held: Iterable[int]) -> None:
    for page in held:
        pages.pool.refs[page] -= 1


def in_one_pass(blocks: BlockManager, sequence: Any, limit: int) -> list[Any]:
    if blocks.cache is None or limit < blocks.block_size:
        return []
    most = limit // blocks.block_size
    entries = blocks.cache.match(sequence.keys, sequence.tokens, sequence.namespace, most)
    for group in blocks.groups[1:]:
        entries = entries[: group.usable(entries)]
    return entries


def one_page_less(usable: Any) -> Any:
    def substitute(pages: WindowPages, entries: Any) -> int:
        pages.reach -= 1
        try:
            found: int = usable(pages, entries)
        finally:
            pages.reach += 1
        return found

    return substitute


def taking_alone(take: Any) -> Any:
    """`WindowPages.take`, which drops what it takes although `drop` does nothing by then."""
    drop = WindowPages.drop

    def substitute(pages: WindowPages, count: int) -> list[int]:
        for _ in range(count - len(pages.pool.free)):
            drop(pages, pages.keeper[next(iter(pages.passed or pages.unused))])
        return pages.pool.take(count)

    return substitute


def stay_unused(hold: Any) -> Any:
    def substitute(pages: WindowPages, held: Iterable[int]) -> None:
        held = list(held)
        unused = [page for page in held if page in pages.unused]
        hold(pages, held)
        pages.unused.update(dict.fromkeys(unused))

    return substitute


def free_kept(pages: WindowPages, page: int, *, passing: bool = False) -> None:
    if page == 1 and not pages.pool.refs[page] and page in pages.keeper:
        pages.pool.put(page)


def the_last_page(publish: Any) -> Any:
    def substitute(blocks: BlockManager, sequence: Any, length: int) -> None:
        others = sequence.tables[1:]
        pages = [table.pages for table in others]
        for table in others:
            table.pages = table.pages[-1:] * len(table.pages)
        try:
            publish(blocks, sequence, length)
        finally:
            for table, own in zip(others, pages, strict=True):
                table.pages = own

    return substitute


def release_first_group(slots: SlotAllocator, step: Step) -> None:
    for changes in step.groups[:1]:
        for source, _ in changes.copies:
            slots.blocks.groups[0].release(source)


def hide_pages(slots: SlotAllocator, step: Step) -> None:
    for changes in step.groups[1:]:
        changes.grown = [entry for entry in changes.grown if entry[1] % 3 != 2]


def hold_page_two(blocks: BlockManager, sequence: Any) -> None:
    for group, table in list(zip(blocks.groups, sequence.tables, strict=True))[1:]:
        group.hold(page for page in table.live if page == 2)


WINDOW_BUGS: dict[str, Plant] = {
    "a page that is seen is given back": instead(
        WindowPages, "first", lambda first: lambda self, position: position // self.block_size
    ),
    "a page is given back one token early": instead(
        WindowPages, "first", lambda first: lambda self, position: first(self, position + 1)
    ),
    "pages are never given back": nothing(BlockManager, "trim"),
    "pages are given back for what is in flight": instead(BlockManager, "trim", trim_in_flight),
    "a hit takes no reference to its pages": afterwards(WindowPages, "hold", uncounted),
    "a hit that one of two windows cannot serve": instead(
        BlockManager, "match", lambda match: in_one_pass
    ),
    "a hit without the pages it sees": result(
        WindowPages, "usable", lambda most, self, entries: len(entries)
    ),
    "a hit sees one page too few": instead(WindowPages, "usable", one_page_less),
    "a page outlives its block": together(
        instead(WindowPages, "take", taking_alone),
        nothing(WindowPages, "drop"),
    ),
    "a page in use is taken again": instead(WindowPages, "hold", stay_unused),
    "a kept page is free as well": afterwards(WindowPages, "release", free_kept),
    "a page of another block is kept": instead(BlockManager, "publish", the_last_page),
    "a copied tail lacks its window page": result(
        BlockManager, "fork", lambda copies, *args: copies[:1]
    ),
    "the source of a copied page is not pinned": result(
        BlockManager, "fork", lambda copies, *args: unpinned(copies, *args, first=1)
    ),
    "a pinned page is never released": instead(
        SlotAllocator, "release_sources", lambda release: release_first_group
    ),
    "shared with one that sees the prompt no more": result(
        BlockManager, "can_fork", lambda can, *args: True
    ),
    "the runner is not told of a page": afterwards(SlotAllocator, "flush", hide_pages),
    "pages of an ended sequence are lost": beforehand(BlockManager, "close", hold_page_two),
    "more blocks than there are pages for": instead(
        BlockManager,
        "available",
        lambda available: property(lambda self: self.groups[0].available),
    ),
    "admitted without room for its pages": result(
        BlockManager,
        "wanted",
        lambda wanted, *args, **options: [wanted[0], *(-(10**6) for _ in wanted[1:])],
    ),
}
