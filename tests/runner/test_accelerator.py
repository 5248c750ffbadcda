"""`CudaAccelerator` on a torch that only notes what it is asked."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from asyncinfer.adapters.device_work import own_stream
from asyncinfer.kernels import streams
from asyncinfer.runner import accelerator
from asyncinfer.runner.accelerator import CudaAccelerator

DEVICE = torch.device("cuda", 1)


class Cuda:
    """What of `torch.cuda` an accelerator uses."""

    def __init__(self) -> None:
        self.made = 0
        self.device = 0
        self.default = object()
        self.current: Any = self.default
        self.log: list[str] = []
        #: Numbers of the streams that libraries were used on before anything was recorded.
        self.woken: list[int] = []
        #: Whether the graph's end fails, as when a call that is not allowed was recorded.
        self.invalid = False
        #: Whether no recording can begin.
        self.busy = False
        self.random = Random()
        #: Whether each recording has a random state of its own, as in newer versions of torch.
        self.own_states = False
        #: By recording: that state, from its beginning to an end without a fault.
        self.recorded: dict[object, RandomState] = {}

    def draw(self) -> int:
        """A number for the host, by either of torch's rules."""
        if self.random.state.marked:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.random.state.drawn += 1
        return self.random.state.drawn

    def stream_of(self, device: torch.device) -> Any:
        assert device == DEVICE
        self.made += 1
        return Stream(self.made)

    def set_stream(self, stream: Any) -> None:
        self.current, self.device = stream, 1

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@dataclass
class RandomState:
    drawn: int = 0
    #: Whether a recording has it.
    marked: bool = False


class Random:
    """A device's default generator."""

    def __init__(self) -> None:
        self.state = RandomState()

    def graphsafe_get_state(self) -> Random:
        shared = Random()
        shared.state = self.state
        return shared

    def graphsafe_set_state(self, other: Random) -> None:
        self.state = other.state

    def clone_state(self) -> Random:
        copied = Random()
        copied.state = replace(self.state)
        return copied


class Stream:
    def __init__(self, number: int) -> None:
        self.number = number

    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            assert fake.current.number % 3 == 0
            assert fake.current.number in fake.woken
            # What draws while it is recorded draws from the state that the generator has now.
            self.random = fake.random.state
            if fake.own_states:
                fake.recorded[self] = self.random
            else:
                self.random.marked = True
            if fake.busy:
                raise RuntimeError("another recording is under way")
            fake.log.append("begin" if not torch.is_inference_mode_enabled() else "inference")

        def capture_end(self) -> None:
            if fake.invalid:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.random.marked = False
            fake.recorded.pop(self, None)
            fake.log.append("end")

        def reset(self) -> None:
            fake.log.append("reset")

    monkeypatch.setattr(streams, "_IDLE", {})
    monkeypatch.setattr(streams, "_stream", fake.stream_of)
    monkeypatch.setattr(
        accelerator, "_wake_libraries", lambda device: fake.woken.append(fake.current.number)
    )
    fakes: dict[str, Any] = {
        "CUDAGraph": Graph,
        "default_generators": (None, fake.random),
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda device: fake.current,
        "current_device": lambda: fake.device,
        "set_stream": fake.set_stream,
        "set_device": lambda device: setattr(fake, "device", device),
        "stream": fake.stream,
        "synchronize": lambda device: fake.log.append("drain"),
        "empty_cache": lambda: fake.log.append("empty"),
    }
    for name, replacement in fakes.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    told = fake.log.append
    end = "_cuda_endAllocateToPool"
    monkeypatch.setattr(torch._C, end, lambda device, pool: told(f"told {device}"), raising=False)
    return fake


def test_streams_of_closed_accelerators_are_used_again(cuda: Cuda) -> None:
    first, second = CudaAccelerator(DEVICE), CudaAccelerator(DEVICE)
    assert cuda.made == 6
    for each in (second, second, first):
        each.close()
    again = [CudaAccelerator(DEVICE) for _ in range(3)]
    assert cuda.made == 9
    assert len({each.main for each in again} | {each.side for each in again}) == 6


def test_a_host_is_never_given_an_engines_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's rule: 32 streams of each of four priorities, in turn."""
    handed: Counter[int] = Counter()
    made: list[Any] = []

    class Pooled(tuple[int, int]):
        def synchronize(self) -> None:
            pass

    def stream(device: torch.device, priority: int = 0) -> Pooled:
        pool = min(max(-priority, 0), 3)
        handed[pool] += 1
        given = Pooled((pool, handed[pool] % 32))
        made.append(given)
        return given

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(streams, "_IDLE", {})
    engine = CudaAccelerator(DEVICE)
    taken = {*made}
    # While adapters are copied, again and again.
    for _ in range(40):
        with own_stream(DEVICE):
            assert not {made[-1]} & taken
    own = set(made)
    assert len(taken) == 3
    assert len(own) == 4
    assert {engine.main, engine.side} < taken
    # torch's own libraries ask for the highest priority, most programs for the default.
    hosts = {stream(DEVICE, priority) for priority in (0, -5) for _ in range(100)}
    assert not own & hosts


def test_a_thread_is_left_as_it_was_found(cuda: Cuda) -> None:
    opened = CudaAccelerator(DEVICE)
    opened.adopt()
    assert (cuda.current, cuda.device) == (opened.main, 1)
    opened.close()
    assert (cuda.current, cuda.device) == (cuda.default, 0)
    opened.adopt()
    # Somebody else has the thread by now.
    cuda.current = other = object()
    opened.close()
    assert cuda.current is other


def test_what_torch_keeps_for_all_graphs_is_no_inference_tensor(cuda: Cuda) -> None:
    modes = []
    with torch.inference_mode():
        CudaAccelerator(DEVICE).capture(lambda: modes.append(torch.is_inference_mode_enabled()))
    assert cuda.log == ["begin", "end"]
    assert modes == [True]


def test_one_recording_at_a_time(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, tried = threading.Lock(), threading.Event()

    class Noted:
        def __enter__(self) -> None:
            if threading.current_thread() is thread:
                tried.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    first, second = CudaAccelerator(DEVICE), CudaAccelerator(DEVICE)
    done: list[tuple[int, bool]] = []
    thread = threading.Thread(
        target=second.capture, args=(lambda: done.append((2, lock.locked())),)
    )
    monkeypatch.setattr(accelerator, "_ONE_AT_A_TIME", Noted())

    def work() -> None:
        thread.start()
        assert tried.wait(120)
        done.append((1, lock.locked()))

    first.capture(work)
    thread.join()
    assert done == [(1, True), (2, True)]


@pytest.mark.parametrize("invalid", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_a_recording_that_fails_is_left(cuda: Cuda, invalid: bool, within: bool) -> None:
    cuda.invalid = invalid

    def work() -> None:
        if within:
            raise RuntimeError("not in a recording")

    opened = CudaAccelerator(DEVICE)
    if not (invalid or within):
        opened.capture(work)
        assert cuda.log == ["begin", "end"]
        return
    with pytest.raises(RuntimeError, match="not in a recording" if within else "not permitted"):
        opened.capture(work)
    assert cuda.log == ["begin", "told 1"] if invalid else ["begin", "end", "reset"]
    assert cuda.current is cuda.default


@pytest.mark.parametrize("own_states", [False, True])
@pytest.mark.parametrize("fault", ["none", "begin", "work", "end"])
def test_the_hosts_random_numbers_are_its_own(cuda: Cuda, fault: str, own_states: bool) -> None:
    """While a step is recorded, and after a recording that failed wherever. A graph keeps none of
    the host's states either, whose numbers its replays would go on with."""
    cuda.own_states = own_states
    opened, drawn = CudaAccelerator(DEVICE), [cuda.draw()]

    def work() -> None:
        drawn.append(cuda.draw())
        assert all(state is not host for state in cuda.recorded.values())
        assert host.drawn == 2
        if fault == "work":
            raise RuntimeError("not in a recording")

    cuda.busy, cuda.invalid = fault == "begin", fault == "end"
    host = cuda.random.state
    with suppress(RuntimeError) if fault != "none" else nullcontext():
        opened.capture(work)
    assert cuda.random.state is host
    drawn.append(cuda.draw())
    assert drawn == list(range(1, len(drawn) + 1))
    assert len(drawn) == (2 if fault == "begin" else 3)
    # A recording that failed holds what is nobody's.
    assert all(state is not host for state in cuda.recorded.values())
    assert not host.marked


def test_one_block_is_held_for_all(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    monkeypatch.setattr(CudaAccelerator, "_hold", lambda self, size: held.append(size))
    opened = CudaAccelerator(DEVICE)
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    opened.capture(nothing, hold=100)
    opened.capture(nothing, hold=100)
    assert held == [100]
    # Once, on the stream that records.
    assert cuda.woken == [3]
    opened.close()
    assert cuda.log == ["begin", "end"] * 3 + ["reset", "empty"]
