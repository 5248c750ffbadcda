"""The answer that a GPU's runner gives before anybody asks finds wrong kernels and wrong recorded
steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice, FakeGraph
from runner.conftest import make_decoder

from asyncinfer.attention import backend
from asyncinfer.config import EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels import dispatch
from asyncinfer.layers import FusedLayer
from asyncinfer.models import decoder
from asyncinfer.quantization import CudaLinear, linear
from asyncinfer.runner.canary import check_answer, check_opened


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as fake:
        yield fake


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of kernels that are wrong; torch's operators are right."""
    names: set[str] = set()

    def kernel_for(reference: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
        if not dispatch.wants_triton() or reference.__name__ not in names:
            return reference
        return lambda x, *args, **options: reference(x.roll(1, -1), *args, **options)

    monkeypatch.setattr(dispatch, "kernel_for", kernel_for)
    yield names
    dispatch.use_triton(True)


@pytest.mark.usefixtures("wrong")
def test_a_runner_that_is_right_stays_as_it_is(make_hand: Any, device: FakeDevice) -> None:
    hand = make_hand(accelerator=device)
    assert check_answer(hand.runner) is None
    assert hand.runner.fallbacks == ()
    assert dispatch.distrusted() is None
    assert device.calls["Graph.replay"] > 4
    # And leaves nothing behind.
    plain = make_hand()
    for each in (hand, plain):
        each.join(0, [5, 17, 3])
        each.row(0, 0, 3)
        each.step()
    assert hand.decode(0, 3, 6) == plain.decode(0, 3, 6)


def test_kernels_that_are_wrong_are_left(
    make_hand: Any, device: FakeDevice, wrong: set[str]
) -> None:
    wrong.add("rms_norm")
    hand = make_hand(accelerator=device)
    with pytest.warns(RuntimeWarning, match="an answer's logprobs are off by"):
        fault = check_answer(hand.runner)
    assert dispatch.distrusted() == fault is not None
    assert [each.part for each in hand.runner.fallbacks] == ["kernels", "graphs"]
    with pytest.raises(ModelLoadError, match="kernels='triton': an answer's logprobs"):
        check_opened(hand.runner, EngineConfig(kernels="triton"))


@pytest.mark.usefixtures("wrong")
def test_recorded_steps_that_are_wrong_are_left(
    make_hand: Any, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeGraph, "replay", lambda graph: None)
    hand = make_hand(accelerator=device)
    with pytest.warns(RuntimeWarning, match="recorded steps is .* nats a token worse"):
        check_answer(hand.runner)
    assert [each.part for each in hand.runner.fallbacks] == ["graphs"]
    assert dispatch.distrusted() is None


@pytest.mark.parametrize("fault", [None, "linear_small"])
def test_layers_of_few_launches_are_compared_with_torchs_operators(
    make_hand: Any, wrong: set[str], monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """Triton's kernels attend over pages, and torch's operators over keys that are gathered."""
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda _: True)
    monkeypatch.setitem(linear._FORMATS, "plain", CudaLinear)
    monkeypatch.setattr(backend, "has_triton_kernel", lambda *_: dispatch.wants_triton())
    hand = make_hand(decoder=make_decoder())
    assert all(isinstance(layer, FusedLayer) for layer in hand.runner.decoder.layers)
    if fault is None:
        assert check_answer(hand.runner) is None
        assert hand.runner.fallbacks == ()
    else:
        wrong.add(fault)
        with pytest.warns(RuntimeWarning, match="an answer's logprobs are off by"):
            check_answer(hand.runner)
    # It serves either way.
    hand.join(0, [5, 17, 3])
    hand.row(0, 0, 3)
    hand.step()
    assert len(hand.decode(0, 3, 6)) == 6


def test_a_runner_without_room_for_it_is_not_checked(make_hand: Any, device: FakeDevice) -> None:
    hand = make_hand(accelerator=device, blocks=2)
    check_opened(hand.runner, EngineConfig())
    assert device.calls["capture"] == 0


def test_a_device_that_fails_is_not_opened(
    make_hand: Any, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    hand = make_hand(accelerator=device)
    monkeypatch.setattr(hand.runner.decoder, "forward", fail)
    monkeypatch.setattr(device, "drain", fail)
    with pytest.raises(ModelLoadError, match=r"unspecified launch failure.*asyncinfer doctor"):
        check_opened(hand.runner, EngineConfig())


def test_nobody_asked_for_a_choice(make_hand: Any, wrong: set[str]) -> None:
    wrong.add("rms_norm")
    hand = make_hand()
    for config in (EngineConfig(kernels="torch"), EngineConfig(deterministic=True)):
        check_opened(hand.runner, config)
    assert hand.runner.fallbacks == ()
    assert dispatch.distrusted() is None


def test_torchs_operators_that_fail_say_nothing_of_kernels(make_hand: Any, wrong: set[str]) -> None:
    hand = make_hand()
    forward = hand.runner.decoder.forward

    def failing(*arguments: Any) -> Any:
        if not dispatch.wants_triton():
            raise RuntimeError("not implemented for 'Float8_e4m3fn'")
        return forward(*arguments)

    wrong.add("rms_norm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand.runner.decoder, "forward", failing)
        check_opened(hand.runner, EngineConfig())
    assert hand.runner.fallbacks == ()
    assert dispatch.wants_triton()
