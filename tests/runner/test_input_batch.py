"""The arithmetic of a step against the same, row by row, in plain Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncinfer.cache import KVGroupSpec
from asyncinfer.params import SamplingParams
from asyncinfer.runner import InputBatch
from asyncinfer.scheduler import Join, PageChanges, RunnerSpec, Step

SLOTS, BLOCK, CONTEXT = 9, 3, 40
SPEC = RunnerSpec(
    groups=(KVGroupSpec(200),),
    block_size=BLOCK,
    max_slots=SLOTS,
    max_context=CONTEXT,
    vocab_size=10,
    max_step_tokens=400,
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Step, dict[int, list[int]]]:
    """A plan and the block table of every slot in it, part of which grows in the plan."""
    plan, tables = Step(0, groups=[PageChanges()]), {}
    blocks = iter(draw(st.permutations(range(200))))
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True)):
        start = draw(st.integers(0, CONTEXT - 1))
        count = draw(st.one_of(st.just(1), st.integers(1, CONTEXT - start)))
        table = [next(blocks) for _ in range(-(-(start + count) // BLOCK))]
        old = draw(st.integers(0, len(table)))
        plan.joins.append(Join(slot, [1], 1, [table[:old]], SamplingParams(), 0))
        plan.groups[0].grown += [(slot, i, table[i]) for i in range(old, len(table))]
        plan.slots.append(slot)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.samples.append(draw(st.integers(0, min(count, 3))))
        tables[slot] = table
    return plan, tables


def built(plan: Step) -> Any:
    batch = InputBatch(SPEC)
    for slot in range(SLOTS):  # earlier sequences with long tables
        batch.join(Join(slot, [1], 1, [[199] * 13], SamplingParams(), 0))
    for join in plan.joins:
        batch.join(join)
    batch.grow(plan.groups)
    return batch.build(plan)


@given(plans())
def test_arrays_equal_those_made_row_by_row(made: tuple[Step, dict[int, list[int]]]) -> None:
    plan, tables = made
    arrays = built(plan)
    rows = sorted(range(len(plan.slots)), key=lambda row: plan.counts[row] != 1)
    assert arrays.decode_rows == plan.counts.count(1)
    assert arrays.starts == [plan.starts[row] for row in rows]
    assert arrays.counts == [plan.counts[row] for row in rows]
    assert arrays.seq_lens.tolist() == [plan.starts[row] + plan.counts[row] for row in rows]
    assert arrays.query_starts.tolist() == [0, *np.cumsum(arrays.counts).tolist()]

    where, token_slots, positions, mapping = {}, [], [], []
    for i, row in enumerate(rows):
        slot, table = plan.slots[row], tables[plan.slots[row]]
        assert arrays.block_tables[0, i, : len(table)].tolist() == table
        assert not arrays.block_tables[0, i, len(table) :].any()
        for position in range(plan.starts[row], plan.starts[row] + plan.counts[row]):
            where[row, position] = len(positions)
            token_slots.append(slot)
            positions.append(position)
            mapping.append(table[position // BLOCK] * BLOCK + position % BLOCK)
    assert arrays.token_slots.tolist() == token_slots
    assert arrays.positions.tolist() == positions
    assert arrays.slot_mapping.tolist() == [mapping]
    assert arrays.block_tables.shape[2] == max(len(table) for table in tables.values())

    draws = []
    for row, slot in enumerate(plan.slots):
        assert arrays.first_tokens[row] == where[row, plan.starts[row]]
        end = plan.starts[row] + plan.counts[row]
        drawn = range(end - plan.samples[row], end)
        draws += [(row, where[row, position], slot, position + 1) for position in drawn]
    columns = (
        arrays.draw_rows,
        arrays.draw_tokens,
        arrays.draw_slots,
        arrays.draw_positions,
    )
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == draws


@given(plans())
def test_types_are_those_of_an_attention_batch(
    made: tuple[Step, dict[int, list[int]]],
) -> None:
    arrays = built(made[0])
    for name in ("block_tables", "seq_lens", "query_starts"):
        assert getattr(arrays, name).dtype == np.int32
    for name in ("token_slots", "positions", "slot_mapping", "draw_tokens", "draw_positions"):
        assert getattr(arrays, name).dtype == np.int64


def test_arrays_of_one_step_survive_the_next() -> None:
    # On the host tensors share memory with them, and two steps may be in flight.
    batch, plan = InputBatch(SPEC), Step(0, slots=[0], starts=[4], counts=[1], samples=[1])
    batch.join(Join(0, [1], 1, [[5, 6]], SamplingParams(), 0))
    first = batch.build(plan)
    batch.join(Join(0, [1], 1, [[8, 9]], SamplingParams(), 0))
    batch.build(plan)
    assert first.block_tables.tolist() == [[[5, 6]]]
    assert first.slot_mapping.tolist() == [[6 * BLOCK + 1]]


def test_a_sequence_keeps_its_number_and_never_gets_anothers() -> None:
    batch, numbers = InputBatch(SPEC), []
    plan = Step(0, slots=[2, 0], starts=[4, 3], counts=[1, 1], samples=[1, 1])
    for joins in ([0, 2], [], [0], [], [2, 0]):
        for slot in joins:
            batch.join(Join(slot, [1], 1, [[5, 6]], SamplingParams(), 0))
        numbers.append(batch.build(plan).sequences)
    assert numbers == [[2, 1], [2, 1], [2, 3], [2, 3], [4, 5]]


def test_every_group_has_tables_and_places_of_its_own() -> None:
    batch = InputBatch(replace(SPEC, groups=(KVGroupSpec(200), KVGroupSpec(20, window=4))))
    batch.join(Join(2, [1], 1, [[5, 6, 7], [-1, 3, 4]], SamplingParams(), 0))
    batch.join(Join(1, [1], 1, [[9], [12]], SamplingParams(), 0))
    batch.grow([PageChanges([(2, 3, 8)]), PageChanges([(2, 3, 11)])])
    plan = Step(0, slots=[2, 1], starts=[7, 2], counts=[4, 1], samples=[1, 1])
    arrays = batch.build(plan)
    full, near = arrays.block_tables.tolist()
    assert full == [[9, 0, 0, 0], [5, 6, 7, 8]]
    assert near == [[12, 0, 0, 0], [0, 3, 4, 11]]
    full, near = arrays.slot_mapping.tolist()
    assert near == [12 * BLOCK + 2] + [
        page * BLOCK + offset for page, offset in ((4, 1), (4, 2), (11, 0), (11, 1))
    ]
    assert full[1:3] == [7 * BLOCK + 1, 7 * BLOCK + 2]
    assert arrays.block_tables.flags.c_contiguous
    assert arrays.slot_mapping.flags.c_contiguous
    batch.join(Join(2, [1], 1, [[1], [2]], SamplingParams(), 0))
    again = batch.build(Step(1, slots=[2], starts=[3], counts=[1], samples=[0]))
    assert again.block_tables.tolist() == [[[1, 0]], [[2, 0]]]
