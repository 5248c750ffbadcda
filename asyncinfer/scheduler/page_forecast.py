"""Forecasts which pages become free when the steps in flight are committed."""

from __future__ import annotations

from collections import abc
from itertools import chain

from asyncinfer.cache.page_group import PageGroup
from asyncinfer.scheduler.sequence import Sequence
from asyncinfer.scheduler.sequence_states import SequenceStates

__all__ = ["expected_blocks", "incoming_pages"]


def expected_blocks(states: SequenceStates) -> int:
    """Blocks that can be allocated, with a page in every KV group, once the steps in flight are
    committed."""
    pages = zip(states.slots.blocks.groups, incoming_pages(states), strict=True)
    return min(group.available + incoming for group, incoming in pages)


def incoming_pages(states: SequenceStates) -> list[int]:
    """The pages that become free in each KV group: those of leaving sequences, and those that no
    later token of a running sequence needs."""
    leaving = states.leaving.values()
    moving = [sequence for sequence in states.running() if sequence.in_flight]
    return [
        # The first group keeps pages of all tokens.
        _incoming(index, group, leaving, moving if index else ())
        for index, group in enumerate(states.slots.blocks.groups)
    ]


def _incoming(
    index: int, group: PageGroup, leaving: abc.Iterable[Sequence], moving: abc.Iterable[Sequence]
) -> int:
    refs = group.pool.refs
    gone = (page for r in leaving for page in r.tables[index].live)
    behind = (
        page
        for r in moving
        for page in r.tables[index].pages[
            r.tables[index].first_live_page : group.first(r.computed - r.drafted)
        ]
    )
    return sum(refs[page] == 1 for page in chain(gone, behind))
