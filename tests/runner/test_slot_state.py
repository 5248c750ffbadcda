"""What the device knows of the slots, and how little it takes to tell it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fakes.fake_device import FakeDevice
from fakes.fake_order import StreamOrderError

from asyncinfer.runner.slot_state import SlotState, Staging

SLOTS, GROUPS, WIDTH, ROWS, OPTIONS = 5, 2, 7, 4, 6


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as fake:
        yield fake


@pytest.fixture
def state(device: FakeDevice) -> SlotState:
    return SlotState(device, SLOTS, GROUPS, WIDTH, ROWS, OPTIONS)


def same(state: SlotState) -> bool:
    return all(
        np.array_equal(there.numpy(), here)
        for there, here in (
            (state.rows, state.host_rows),
            (state.positions, state.host_positions),
            (state.options, state.host_options),
            (state.tables, state.host_tables),
        )
    )


def test_at_first_there_is_nothing_but_padding(state: SlotState) -> None:
    state.send(Staging())
    assert state.rows.tolist() == [SLOTS] * ROWS
    assert state.positions.tolist() == [0] * SLOTS + [-1]
    assert same(state)


def test_the_parts_are_apart_and_hold_64_bits(state: SlotState) -> None:
    parts = (state.rows, state.positions, state.options, state.tables)
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [int(part.min()) for part in parts] == [0, 1, 2, 3] == [int(p.max()) for p in parts]
    assert state.options.view(torch.int64).shape == (SLOTS + 1, OPTIONS // 2)


def test_one_copy_and_one_scatter_bring_everything(state: SlotState, device: FakeDevice) -> None:
    state.send(Staging())
    state.host_tables[3, 0, :4] = [9, 8, 7, 6]
    state.touch_tables(0, 3, np.arange(4))
    state.host_tables[1, 1, 2] = 5
    state.touch_tables(1, np.array([1]), np.array([2]))
    state.set_options(3, np.arange(1, 7, dtype=np.int32))
    state.place([3, 1], [11, 20], 4)
    assert not same(state)
    device.calls.clear()
    state.send(Staging())
    assert device.calls["copy_"] == device.calls["index_copy_"] == 1
    assert same(state)
    assert state.rows.tolist() == [3, 1, SLOTS, SLOTS]
    assert state.positions.tolist()[1:4:2] == [20, 11]


def test_what_the_device_counts_itself_is_not_sent(state: SlotState, device: FakeDevice) -> None:
    state.place([3, 1], [11, 20], 2)
    state.send(Staging())
    state.positions[torch.tensor([3, 1])] += 1
    state.counted(np.array([3, 1]))
    assert same(state)
    device.calls.clear()
    slots, starts = state.place([3, 1], [12, 21], 2)
    state.send(Staging())
    assert not device.calls
    assert (slots.tolist(), starts.tolist()) == ([3, 1], [12, 21])
    # A row fewer, and the other went on elsewhere in between.
    state.place([1], [25], 1)
    state.send(Staging())
    assert same(state)
    assert state.rows.tolist()[:2] == [1, 1]
    assert state.positions.tolist()[1] == 25


def test_the_last_change_of_an_entry_counts(state: SlotState) -> None:
    for block in (4, 5):
        state.host_tables[0, 0, 0] = block
        state.touch_tables(0, np.array([0]), np.array([0]))
    state.send(Staging())
    assert state.tables[0, 0, 0] == 5


def test_more_than_fits_a_small_copy(device: FakeDevice) -> None:
    state = SlotState(device, 40, 1, 50, 8, OPTIONS)
    staging = Staging()
    event = device.event()
    for turn in range(3):
        state.host_tables[:40] = np.random.default_rng(turn).integers(0, 1000, (40, 1, 50))
        for slot in range(40):
            state.touch_tables(0, slot, np.arange(50))
        state.send(staging)
        event.record(device.main)
        event.synchronize()
        assert same(state)
        state.place([turn], [turn + 1], 1)
        state.send(Staging())
        assert same(state)


def test_staging_in_use_may_not_be_written_again(state: SlotState, device: FakeDevice) -> None:
    staging = Staging()
    state.place([1], [5], 1)
    state.send(staging)
    state.place([2], [6], 1)
    state.send(staging)
    event = device.event()
    event.record(device.main)
    with pytest.raises(StreamOrderError, match="pinned memory was written"):
        event.synchronize()
