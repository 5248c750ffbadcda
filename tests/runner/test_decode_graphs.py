"""Which batches are recorded, when, and what happens when they cannot be."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.fake_device import FakeDevice

from asyncinfer.runner.accelerator import Graph
from asyncinfer.runner.decode_graphs import DecodeGraphs, batch_sizes
from asyncinfer.runner.fallbacks import Fallbacks
from asyncinfer.sampling import Draws

GREEDY, LOGITS = Draws.GREEDY, Draws.LOGITS


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as fake:
        yield fake


class Steps:
    """Counts how often Python ran the step, and whether the collector was on."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, Draws]] = []
        self.collecting: list[bool] = []

    def __call__(self, size: int, draws: Draws, adapted: bool = False) -> None:
        self.ran.append((size, draws))
        self.collecting.append(gc.isenabled())


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
        (1000, [1, 2, 4, *range(8, 257, 8)]),
    ],
)
def test_sizes(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def test_a_batch_runs_in_the_smallest_size_that_holds_it(device: FakeDevice) -> None:
    graphs = DecodeGraphs(device, Steps(), batch_sizes(100))
    assert [graphs.size_for(rows) for rows in (1, 2, 3, 5, 9, 97, 100)] == [
        1,
        2,
        4,
        8,
        16,
        100,
        100,
    ]
    assert graphs.most_rows == 100


def test_the_first_of_its_kind_runs_and_is_recorded_then_it_is_replayed(
    device: FakeDevice,
) -> None:
    steps = Steps()
    graphs = DecodeGraphs(device, steps, [1, 4])
    assert gc.isenabled()
    for _ in range(3):
        graphs.run(4, GREEDY)
    graphs.run(1, GREEDY)
    graphs.run(4, LOGITS)
    assert steps.ran == [(4, GREEDY)] * 2 + [(1, GREEDY)] * 2 + [(4, LOGITS)] * 2
    assert steps.collecting == [True, False] * 3
    assert gc.isenabled()
    assert (graphs.recorded, device.calls["Graph.replay"]) == (3, 2)


def test_a_collector_that_was_off_stays_off(device: FakeDevice) -> None:
    gc.disable()
    try:
        DecodeGraphs(device, Steps(), [1]).run(1, GREEDY)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_engines_that_record_in_turn(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to be done leaves the collector off for who has waited."""
    waits, goes_on = threading.Event(), threading.Event()
    capture, later = device.capture, Steps()

    def in_turn(work: Callable[[], None], *, hold: int = 0) -> Graph:
        if threading.current_thread() is second:
            waits.set()
            assert goes_on.wait(120)
        else:
            second.start()
            assert waits.wait(120)
        return capture(work, hold=hold)

    def other() -> None:
        DecodeGraphs(device, later, [1]).run(1, GREEDY)

    second = threading.Thread(target=other)
    monkeypatch.setattr(device, "capture", in_turn)
    DecodeGraphs(device, Steps(), [1]).run(1, GREEDY)
    goes_on.set()
    second.join()
    assert not later.collecting[-1]
    assert gc.isenabled()


def test_all_at_start_the_largest_first(device: FakeDevice) -> None:
    steps = Steps()
    graphs = DecodeGraphs(device, steps, [1, 2, 4])
    graphs.record_all()
    assert [size for size, _ in steps.ran[:: 2 * len(Draws)]] == [4, 2, 1]
    assert graphs.recorded == 3 * len(Draws)
    steps.ran.clear()
    graphs.run(2, LOGITS)
    assert not steps.ran


def test_a_recording_that_fails_is_told_once_and_all_goes_on(
    device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    steps, fallbacks = Steps(), Fallbacks()
    graphs = DecodeGraphs(device, steps, [1, 2], fallbacks=fallbacks)
    graphs.run(1, GREEDY)
    device.failing = 10
    with (
        caplog.at_level("WARNING", logger="asyncinfer"),
        pytest.warns(RuntimeWarning, match="not recorded: recording 2 rows failed: CUDA") as warned,
    ):
        for _ in range(3):
            graphs.run(2, GREEDY)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "fallback part='graphs'" in said[0]
    assert "capturing" in said[0]
    assert len(warned) == 1
    (fallback,) = fallbacks.found
    assert fallback.part == "graphs"
    assert "2 rows" in fallback.reason
    assert device.calls["capture"] == 2
    assert gc.isenabled()
    steps.ran.clear()
    graphs.run(1, GREEDY)
    graphs.run(2, GREEDY)
    assert steps.ran == [(2, GREEDY)]


def test_what_is_no_fault_of_the_device_is_raised(device: FakeDevice) -> None:
    def step(size: int, draws: Draws, adapted: bool) -> Any:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        DecodeGraphs(device, step, [1]).run(1, GREEDY)


def test_closing_gives_the_graphs_back_and_records_no_more(device: FakeDevice) -> None:
    steps = Steps()
    graphs = DecodeGraphs(device, steps, [1])
    graphs.run(1, GREEDY)
    graphs.close()
    assert graphs.recorded == 0
    graphs.run(1, GREEDY)
    assert graphs.recorded == 0
