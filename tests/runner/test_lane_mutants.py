"""The tests of the lane, tested: each of these planted bugs is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes.fake_device import FakeDevice
from fakes.fake_graph import ReplayError
from fakes.fake_order import FakeEvent, StreamOrderError
from runner.churn import churn

from asyncinfer.runner.decode_lane import DecodeLane
from asyncinfer.runner.downloads import Berth, Berths
from asyncinfer.runner.slot_state import SlotState
from asyncinfer.sampling import TokenHistory

Patch = Callable[[pytest.MonkeyPatch], None]


def nothing(*arguments: Any) -> None:
    pass


def the_side_stream_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeEvent, "wait", nothing)


def the_host_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Berth, "wait", nothing)


def results_are_not_kept_until_they_were_copied(patch: pytest.MonkeyPatch) -> None:
    def start(berth: Berth, *arguments: Any) -> None:
        whole(berth, *arguments)
        berth._sources.clear()

    whole = Berth._start
    patch.setattr(Berth, "_start", start)


def steps_share_a_berth(patch: pytest.MonkeyPatch) -> None:
    take, only = Berths.take, []

    def shared(berths: Berths) -> Berth:
        if not only:
            only.append(take(berths))
        return only[0]

    patch.setattr(Berths, "take", shared)


def grown_tables_are_not_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeLane, "grow", nothing)


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
    def shifted(lane: DecodeLane, *arguments: Any, **options: Any) -> None:
        whole(lane, *arguments, **options)
        lane._turn = 1

    whole = DecodeLane.__init__
    patch.setattr(DecodeLane, "__init__", shifted)


@pytest.mark.parametrize(
    "mutant",
    [
        the_side_stream_does_not_wait,
        the_host_does_not_wait,
        results_are_not_kept_until_they_were_copied,
        steps_share_a_berth,
        grown_tables_are_not_sent,
        options_are_not_sent,
        positions_are_taken_to_be_right,
        rows_are_taken_to_be_right,
        the_history_moves_under_the_graphs,
        results_are_read_a_place_off,
    ],
)
def test_a_planted_bug_is_noticed(
    make_hand: Any, monkeypatch: pytest.MonkeyPatch, mutant: Patch
) -> None:
    expected = churn(make_hand(), 1, 4)
    mutant(monkeypatch)
    with FakeDevice() as device:
        try:
            found = churn(make_hand(accelerator=device), 3, 4)
        except (StreamOrderError, ReplayError, IndexError, RuntimeError):
            return
    assert found != expected
