"""The fake device notices what a GPU would only get wrong."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fakes.fake_device import FakeDevice, HiddenSyncError
from fakes.fake_graph import ReplayError
from fakes.fake_order import StreamOrderError


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as fake:
        yield fake


def test_a_stream_must_wait_for_what_it_reads_and_overwrites(device: FakeDevice) -> None:
    made = torch.zeros(3)
    made.add_(1)
    with device.on_side(), pytest.raises(StreamOrderError, match="add on side reads what main"):
        made + 1
    event = device.event()
    event.record(device.main)
    event.wait(device.side)
    with device.on_side():
        made + 1
    with pytest.raises(StreamOrderError, match="add_ on main overwrites under side"):
        made.add_(1)
    event.record(device.side)
    event.wait(device.main)
    made.add_(1)


def test_waiting_is_passed_on_and_stands_for_what_was_there_when_recorded(
    device: FakeDevice,
) -> None:
    made = torch.zeros(3)
    early = device.event()
    early.record(device.main)
    made.add_(1)
    early.wait(device.side)
    with device.on_side(), pytest.raises(StreamOrderError):
        made + 1
    late = device.event()
    late.record(device.main)
    late.synchronize()
    # The host has waited, and hands over afterwards.
    with device.on_side():
        made + 1


def test_an_event_that_was_never_recorded(device: FakeDevice) -> None:
    with pytest.raises(StreamOrderError, match="before it was recorded"):
        device.event().synchronize()


def test_pinned_memory_is_poison_until_the_host_has_waited(device: FakeDevice) -> None:
    there = torch.arange(3, dtype=torch.int32)
    here = device.pinned(12).view(torch.int32)
    here.copy_(there, non_blocking=True)
    assert here.numpy().tolist() != [0, 1, 2]
    event = device.event()
    event.record(device.main)
    assert here.numpy().tolist() != [0, 1, 2]
    event.synchronize()
    assert here.numpy().tolist() == [0, 1, 2]


def test_pinned_memory_may_not_be_written_while_it_is_copied_from(device: FakeDevice) -> None:
    there = torch.zeros(3, dtype=torch.int32)
    here = device.pinned(12).view(torch.int32)
    event = device.event()
    for late in (False, True):
        here.numpy()[:] = 5
        there.copy_(here, non_blocking=True)
        event.record(device.main)
        if not late:
            event.synchronize()
            continue
        here.numpy()[:] = 6
        with pytest.raises(StreamOrderError, match="pinned memory was written"):
            event.synchronize()


def test_what_is_copied_from_may_not_change_before_the_copy_is_there(device: FakeDevice) -> None:
    there = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    here = device.pinned(8).view(torch.float32)
    event = device.event()
    for row in (1, 0):
        event.record(device.main)
        event.wait(device.side)
        with device.on_side():
            here.copy_(there[0])
        event.record(device.side)
        there[row] = 5.0
        if row:
            event.synchronize()
            assert here.numpy()[0] == 1.0
            continue
        with pytest.raises(StreamOrderError, match="device memory was written"):
            event.synchronize()


def test_what_is_copied_from_may_not_be_freed_before_the_copy_is_there(
    device: FakeDevice,
) -> None:
    there, here = torch.ones(2), device.pinned(8).view(torch.float32)
    event = device.event()
    here.copy_(there)
    event.record(device.main)
    del there
    gc.collect()
    with pytest.raises(StreamOrderError, match="freed while it was copied"):
        event.synchronize()


def test_a_graph_does_nothing_when_recorded_and_the_same_again_when_replayed(
    device: FakeDevice,
) -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.zeros(2)
    made = []

    def work() -> None:
        twice = x * 2
        made.append(twice)
        y[:1].add_(twice[1:])

    graph = device.capture(work)
    assert y.tolist() == [0.0, 0.0]
    assert made[0].isnan().all()
    graph.replay()
    assert y.tolist() == [4.0, 0.0]
    x[1] = 10.0
    graph.replay()
    assert y.tolist() == [24.0, 0.0]
    assert made[0].isnan().all()
    assert len(made) == 1


def test_a_graph_of_memory_that_was_freed(device: FakeDevice) -> None:
    held, y = [torch.ones(2)], torch.zeros(2)
    graph = device.capture(lambda: y.add_(held[0]))
    graph.replay()
    held.clear()
    gc.collect()
    with pytest.raises(ReplayError, match="freed"):
        graph.replay()


def test_memory_that_a_graph_did_not_make_itself_and_nobody_kept(device: FakeDevice) -> None:
    y, held = torch.zeros(2), [torch.ones(2)]
    graph = device.capture(lambda: y.add_(held.pop()))
    gc.collect()
    with pytest.raises(ReplayError, match="freed"):
        graph.replay()


def test_numbers_from_the_host_cannot_be_recorded(device: FakeDevice) -> None:
    y = torch.zeros(2)
    for work in (lambda: y.add_(torch.tensor([1.0, 2.0])), lambda: torch.where(y > 0, y, -1.0)):
        work()
        with pytest.raises(HiddenSyncError, match="from the host"):
            device.capture(work)
    device.capture(lambda: y.masked_fill_(y > 0, -1.0).mul_(2.0))


def test_a_replay_keeps_to_the_order_of_streams(device: FakeDevice) -> None:
    y = torch.zeros(2)
    graph = device.capture(lambda: y.add_(1))
    graph.replay()
    with device.on_side(), pytest.raises(StreamOrderError, match="a replayed graph on side"):
        graph.replay()


def test_hidden_syncs(device: FakeDevice) -> None:
    x = torch.ones(3)
    assert x.sum().item() == 3.0
    with device.without_syncs():
        for sync in (
            lambda: x.sum().item(),
            lambda: x[x > 0],
            lambda: x.nonzero(),
            lambda: bool(x[0]),
            x.tolist,
            x.numpy,
            x.cpu,
            lambda: np.asarray(x),
        ):
            with pytest.raises(HiddenSyncError):
                sync()
        assert device.pinned(2).tolist() == [0, 0]
    for read in (lambda: x.sum().item(), x.tolist):
        with pytest.raises(HiddenSyncError):
            device.capture(read)
    x.add_(1)


def test_recording_fails_when_told_to_and_a_graph_ends(device: FakeDevice) -> None:
    device.failing = 1
    x = torch.zeros(1)
    with pytest.raises(RuntimeError, match="capturing"):
        device.capture(lambda: x.add_(1))
    graph = device.capture(lambda: x.add_(1))
    graph.reset()
    with pytest.raises(ReplayError, match="gave its memory back"):
        graph.replay()


def test_calls_are_counted(device: FakeDevice) -> None:
    x = torch.zeros(4)
    device.calls.clear()
    x.add_(1)
    x[1:].view(3)
    assert x.shape == (4,)
    device.event().record(device.main)
    assert device.calls == {"add_": 1, "__getitem__": 1, "view": 1, "Event.record": 1}
