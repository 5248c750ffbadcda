"""The tests of the graph executor, tested: each of these planted bugs is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes.fake_device import FakeDevice
from fakes.fake_graph import ReplayError
from fakes.fake_order import FakeEvent, StreamOrderError
from runner.churn import churn
from runner.conftest import Hand

from asyncinfer.models import Decoder
from asyncinfer.runner.graph_executor import GraphExecutor
from asyncinfer.runner.pending_step import BufferPool, PinnedBuffers, StepBuffers
from asyncinfer.runner.slot_state import SlotState
from asyncinfer.sampling import TokenHistory

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> list[int]:
    return churn(Hand(decoder), 1, 4)


def nothing(*arguments: Any) -> None:
    pass


def the_side_stream_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeEvent, "wait", nothing)


def the_host_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinnedBuffers, "wait", nothing)


def results_are_not_kept_until_they_were_copied(patch: pytest.MonkeyPatch) -> None:
    def start(buffers: PinnedBuffers, *arguments: Any) -> None:
        whole(buffers, *arguments)
        buffers.sources.clear()

    whole = PinnedBuffers.start
    patch.setattr(PinnedBuffers, "start", start)


def steps_share_buffers(patch: pytest.MonkeyPatch) -> None:
    take, only = BufferPool.take, []

    def shared(pool: BufferPool) -> StepBuffers:
        if not only:
            only.append(take(pool))
        return only[0]

    patch.setattr(BufferPool, "take", shared)


def grown_tables_are_not_sent(patch: pytest.MonkeyPatch) -> None:
    touch = SlotState.touch_tables

    def joins(state: SlotState, group: int, slots: Any, indices: Any) -> None:
        if isinstance(slots, int):
            touch(state, group, slots, indices)

    patch.setattr(SlotState, "touch_tables", joins)


def options_are_not_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotState, "set_options", nothing)


def positions_are_taken_to_be_right(patch: pytest.MonkeyPatch) -> None:
    def place(state: SlotState, slots: Sequence[int], starts: Sequence[int], size: int) -> Any:
        state.host_positions[list(slots)] = starts
        return whole(state, slots, starts, size)

    whole = SlotState.place
    patch.setattr(SlotState, "place", place)


def rows_are_taken_to_be_right(patch: pytest.MonkeyPatch) -> None:
    def place(state: SlotState, slots: Sequence[int], starts: Sequence[int], size: int) -> Any:
        state.host_rows[: len(slots)] = slots
        return whole(state, slots, starts, size)

    whole = SlotState.place
    patch.setattr(SlotState, "place", place)


def the_history_moves_under_the_graphs(patch: pytest.MonkeyPatch) -> None:
    def small(history: TokenHistory, *arguments: Any, capacity: int = 16) -> None:
        whole(history, *arguments, capacity=16)

    whole = TokenHistory.__init__
    patch.setattr(TokenHistory, "__init__", small)


def results_are_read_a_place_off(patch: pytest.MonkeyPatch) -> None:
    def shifted(executor: GraphExecutor, *arguments: Any, **options: Any) -> None:
        whole(executor, *arguments, **options)
        executor.turn = 1

    whole = GraphExecutor.__init__
    patch.setattr(GraphExecutor, "__init__", shifted)


@pytest.mark.parametrize(
    "mutant",
    [
        the_side_stream_does_not_wait,
        the_host_does_not_wait,
        results_are_not_kept_until_they_were_copied,
        steps_share_buffers,
        grown_tables_are_not_sent,
        options_are_not_sent,
        positions_are_taken_to_be_right,
        rows_are_taken_to_be_right,
        the_history_moves_under_the_graphs,
        results_are_read_a_place_off,
    ],
)
def test_a_planted_bug_is_noticed(
    make_hand: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch, mutant: Patch
) -> None:
    mutant(monkeypatch)
    with FakeDevice() as device:
        try:
            found = churn(make_hand(accelerator=device), 3, 4)
        except (StreamOrderError, ReplayError, IndexError, RuntimeError):
            return
    assert found != expected
