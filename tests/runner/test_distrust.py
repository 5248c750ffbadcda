"""A Triton kernel that cannot be launched while the engine serves: its step is computed by torch's
operators, and so are all after it. A device that has failed ends the runner, and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice

from asyncinfer.kernels import dispatch
from asyncinfer.kernels.dispatch import KernelError
from asyncinfer.runner.accelerator import DeviceError

PROMPTS = {0: [5, 17, 3, 44, 9, 9, 21, 30, 2, 50, 11], 1: [1, 2, 3]}
OPTIONS: dict[int, dict[str, Any]] = {0: {}, 1: {"temperature": 0.8, "logprobs": 2}}
STICKY = "CUDA error: an illegal memory access was encountered\nCompile with ..."


class Kernels:
    """Kernels beside the reference ones that give the same; one call of theirs fails."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.name = ""
        #: The launch in which it fails, at which of its calls.
        self.launch, self.left = 0, 1
        self.launches = self.calls = 0

    def kernel_for(self, reference: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
        if dispatch.distrusted() is not None:
            return reference

        def kernel(*args: Any, **options: Any) -> Any:
            self.calls += 1
            fails = self.error is not None and self.launches > self.launch
            if fails and reference.__name__ == self.name:
                self.left -= 1
                if self.left == 0:
                    assert self.error is not None
                    raise self.error
            return reference(*args, **options)

        return kernel


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    fake = Kernels()
    monkeypatch.setattr(dispatch, "kernel_for", fake.kernel_for)
    yield fake
    dispatch.use_triton(True)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as fake:
        yield fake


def answers(hand: Any, kernels: Kernels, in_flight: int = 1) -> list[int]:
    """Two requests, the second one a few steps after the first, `in_flight` steps at once."""
    tokens: list[int] = []
    flights: list[Any] = []
    for i in range(12):
        if len(flights) == in_flight:
            tokens += hand.runner.collect(flights.pop(0)).tokens
        for slot, begins in ((0, 0), (1, 5)):
            n = len(PROMPTS[slot])
            if i == begins:
                hand.join(slot, PROMPTS[slot], seed=slot + 1, **OPTIONS[slot])
                hand.row(slot, 0, n)
            elif i > begins:
                hand.row(slot, n + i - begins - 1, 1)
        kernels.launches += 1
        flights.append(hand.launch())
    for flight in flights:
        tokens += hand.runner.collect(flight).tokens
    return tokens


@pytest.mark.parametrize(
    ("name", "launch", "call", "in_flight"),
    [
        ("rms_norm", 0, 1, 1),  # a prompt
        ("rms_norm", 1, 4, 1),  # a step that is to be recorded, before it draws
        ("keep_draws", 1, 1, 3),  # and after that
        ("rms_norm", 5, 2, 3),  # a prompt beside a row that decodes
    ],
)
def test_the_step_is_done_again_without_it(
    make_hand: Any,
    device: FakeDevice,
    kernels: Kernels,
    name: str,
    launch: int,
    call: int,
    in_flight: int,
) -> None:
    expected = answers(make_hand(), kernels)
    kernels.launches, kernels.name, kernels.launch, kernels.left = 0, name, launch, call
    kernels.error = OSError("Failed\nno C compiler found")
    hand = make_hand(accelerator=device)
    with pytest.warns(RuntimeWarning, match=rf"{name}: OSError: no C compiler found") as warned:
        assert answers(hand, kernels, in_flight) == expected
    assert kernels.left == 0
    assert len(warned) == 1
    assert [each.part for each in hand.runner.fallbacks] == ["kernels", "graphs"]
    # No graph is replayed that holds such kernels, and none is recorded.
    replays, calls = device.calls["Graph.replay"], kernels.calls
    hand.decode(0, len(PROMPTS[0]) + 11, 2)
    assert (device.calls["Graph.replay"], kernels.calls) == (replays, calls)
    assert hand.runner.executor.graphs.recorded == 0


def test_a_kernel_that_cannot_be_recorded_is_launched(
    make_hand: Any, device: FakeDevice, kernels: Kernels
) -> None:
    expected = answers(make_hand(), kernels)
    kernels.launches, kernels.name, kernels.launch, kernels.left = 0, "keep_draws", 1, 2
    kernels.error = RuntimeError("operation not permitted when stream is capturing")
    hand = make_hand(accelerator=device)
    with pytest.warns(RuntimeWarning, match="recording 1 rows failed: keep_draws: RuntimeError"):
        assert answers(hand, kernels) == expected
    assert [each.part for each in hand.runner.fallbacks] == ["graphs"]
    assert dispatch.distrusted() is None


def test_a_kernel_without_memory_is_no_fault_of_the_kernel(
    make_hand: Any, device: FakeDevice, kernels: Kernels
) -> None:
    kernels.name, kernels.error = "rms_norm", torch.OutOfMemoryError("not enough")
    hand = make_hand(accelerator=device)
    with pytest.raises(MemoryError, match="not enough"):
        answers(hand, kernels)
    assert hand.runner.fallbacks == ()


def test_a_device_that_has_failed_ends_it(
    make_hand: Any, device: FakeDevice, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drain() -> None:
        raise RuntimeError(STICKY)

    kernels.name, kernels.error = "rms_norm", RuntimeError(STICKY)
    hand = make_hand(accelerator=device)
    monkeypatch.setattr(device, "drain", drain)
    with pytest.raises(DeviceError, match=r"illegal memory access was encountered; .*doctor"):
        answers(hand, kernels)
    assert hand.runner.fallbacks == ()
    assert dispatch.distrusted() is None


def test_a_device_that_fails_after_the_launch_ends_it(
    make_hand: Any, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = make_hand(accelerator=device)
    hand.join(0, PROMPTS[0])
    hand.row(0, 0, len(PROMPTS[0]))
    flight = hand.launch()

    def wait() -> None:
        raise RuntimeError(STICKY)

    monkeypatch.setattr(type(flight.buffers), "wait", lambda self: wait())
    with pytest.raises(DeviceError, match="doctor"):
        hand.runner.collect(flight)


def test_answers_that_are_to_be_the_same_bits_end(make_hand: Any, kernels: Kernels) -> None:
    kernels.name, kernels.error = "rms_norm", OSError("no C compiler found")
    with pytest.raises(KernelError, match="rms_norm: OSError: no C compiler found"):
        answers(make_hand(deterministic=True), kernels)
    assert dispatch.distrusted() is None
