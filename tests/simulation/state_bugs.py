"""Bugs in the pages of layers with a state, and in what is rolled back of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulation.planted import Plant, afterwards, instead, nothing, result, together
from simulation.window_bugs import free_kept, one_page_less, stay_unused, taking_alone, uncounted

from asyncinfer.cache import BlockManager, StatePages
from asyncinfer.cache.entry import CacheEntry
from asyncinfer.scheduler import Step
from asyncinfer.scheduler.slot_allocator import SlotAllocator

__all__ = ["STATE_BUGS"]


def rewound_by(tokens: int) -> Plant:
    """Rolled back to another place."""

    def moved(slots: SlotAllocator, step: Step) -> None:
        for changes in step.groups:
            changes.rewound = [(slot, at + tokens) for slot, at in changes.rewound]

    return afterwards(SlotAllocator, "flush", moved)


def lose_some(slots: SlotAllocator, step: Step) -> None:
    for changes in step.groups:
        changes.rewound = [entry for entry in changes.rewound if entry[1] % 4]


def of_the_block_before(pages: list[int], group: StatePages, entries: Sequence[CacheEntry]) -> Any:
    if len(entries) > 1 and entries[-2].block in group.kept:
        return [group.kept[entries[-2].block]]
    return pages


def shared_with_the_next(group: BlockManager, sequence: Any, count: int) -> None:
    for kind, table in zip(group.groups, sequence.tables, strict=True):
        if isinstance(kind, StatePages) and len(table.pages) > 1 and table.pages[-2] >= 0:
            kind.release(table.pages[-1])
            kind.hold(table.pages[-2:-1])
            table.pages[-1] = table.pages[-2]


def without_its_first(keep: Any) -> Any:
    def substitute(group: StatePages, block: int, page: int, *, again: bool) -> None:
        other = next(iter(group.keeper), page)
        keep(group, block, page, again=again)
        if page in group.keeper and other != page:
            # The page that is found stands for another block.
            group.kept[block], group.kept[group.keeper[other]] = other, page
            group.keeper[page], group.keeper[other] = group.keeper[other], block

    return substitute


STATE_BUGS: dict[str, Plant] = {
    "a wrong draft stays in the state": nothing(SlotAllocator, "rewind"),
    "a state is rolled back too far": rewound_by(-1),
    "a state is rolled back too little": rewound_by(1),
    "some states are not rolled back": afterwards(SlotAllocator, "flush", lose_some),
    "forked from a state that went on": result(StatePages, "can_fork", lambda can, *args: True),
    "a hit without its state": result(
        StatePages, "usable", lambda most, self, entries: len(entries)
    ),
    "a hit goes on from the state of the block before": result(
        StatePages, "pages", of_the_block_before
    ),
    "the state before is given back too early": instead(
        StatePages, "first", lambda first: lambda self, position: position // self.block_size
    ),
    "no state is asked for": instead(StatePages, "usable", one_page_less),
    "a state in use is taken again": instead(StatePages, "hold", stay_unused),
    "a hit takes no reference to its state": afterwards(StatePages, "hold", uncounted),
    "a kept state is free as well": afterwards(StatePages, "release", free_kept),
    "a state outlives its block": together(
        instead(StatePages, "take", taking_alone), nothing(StatePages, "drop")
    ),
    "two blocks have one state": afterwards(BlockManager, "grow", shared_with_the_next),
    "states of two blocks are mixed up": instead(StatePages, "keep", without_its_first),
}
