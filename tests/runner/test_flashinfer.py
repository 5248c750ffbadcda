"""A runner whose attention is FlashInfer's: where it is refused, tried, and gone without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice
from fakes.fake_flashinfer import FakeFlashInfer

from asyncinfer.attention import KVCache, backend, use_flashinfer
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.config import EngineConfig
from asyncinfer.errors import InvalidConfig, ModelLoadError
from asyncinfer.kernels import dispatch, flashinfer, trust
from asyncinfer.kernels.trial import TrialShapes
from asyncinfer.kernels.trust import find_flashinfer_fault
from asyncinfer.kernels.verdicts import Verdicts
from asyncinfer.models import Decoder
from asyncinfer.runner import device as runner_device
from asyncinfer.runner import open_runner, opening
from asyncinfer.runner.canary import check_answer
from asyncinfer.runner.step_memory import activation_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPES = TrialShapes(
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=500,
    dtype=torch.float16,
    kv_dtype=torch.float16,
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    installed = FakeFlashInfer()
    monkeypatch.setitem(sys.modules, "flashinfer", installed)
    monkeypatch.setattr(flashinfer, "_WORKSPACE", 1 << 10)
    for module in (flashinfer, trust, runner_device):
        monkeypatch.setattr(module, "flashinfer_is_missing", lambda: None)
    return installed


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as held:
        yield held


@pytest.fixture
def hand(make_hand: Any, monkeypatch: pytest.MonkeyPatch, fake: FakeFlashInfer) -> Any:
    """A runner that attends by FlashInfer, as on a GPU."""
    monkeypatch.setattr(backend, "has_triton_kernel", lambda *_: dispatch.wants_triton())
    made = make_hand()
    use_flashinfer(made.runner.kv)
    return made


def answered(hand: Any) -> Any:
    """A prompt in two chunks, a second one beside it, and some tokens."""
    hand.join(0, [5, 17, 3, 44, 9, 9, 21, 30, 2, 50, 11])
    hand.row(0, 0, 7)
    hand.step()
    hand.row(0, 7, 4)
    hand.step()
    return hand.decode(0, 11, 6)


def test_answers_are_those_of_our_own_kernels(
    hand: Any, make_hand: Any, fake: FakeFlashInfer
) -> None:
    assert answered(hand) == answered(make_hand())
    layers = hand.runner.decoder.config.num_layers
    # Planned once a step, whatever the layers.
    assert fake.runs == layers * len(fake.plans) > 8
    assert hand.runner.fallbacks == ()


@pytest.mark.parametrize("call", ["plan", "run"])
def test_a_fault_of_it_costs_nothing_but_itself(
    hand: Any, make_hand: Any, fake: FakeFlashInfer, call: str
) -> None:
    fake.faults[call] = RuntimeError("nvcc: not found\nno kernel image is available")
    with pytest.warns(RuntimeWarning, match=r"in place of FlashInfer's: .*no kernel image"):
        got = answered(hand)
    assert got == answered(make_hand())
    assert [each.part for each in hand.runner.fallbacks] == ["attention"]
    assert fake.runs == 0


def test_memory_that_it_lacks_is_a_smaller_step(hand: Any, fake: FakeFlashInfer) -> None:
    fake.faults["plan"] = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(MemoryError, match="out of memory"):
        answered(hand)
    assert hand.runner.fallbacks == ()


def test_an_opening_finds_it_wrong(hand: Any, fake: FakeFlashInfer) -> None:
    """A canary, whose fault is not Triton's."""
    assert check_answer(hand.runner) is None
    fake.off = 3.0
    with pytest.warns(RuntimeWarning, match="FlashInfer's: an answer's logprobs are off"):
        assert check_answer(hand.runner) is None
    assert [each.part for each in hand.runner.fallbacks] == ["attention"]


def test_recorded_steps_are_our_own_kernels(
    make_hand: Any, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, fake: FakeFlashInfer
) -> None:
    made = make_hand(accelerator=device)
    use_flashinfer(made.runner.kv)
    answered(made)
    assert device.calls["Graph.replay"] > 4
    assert fake.runs == 0


def test_a_trial_is_of_its_attention_alone(fake: FakeFlashInfer, tmp_path: Path) -> None:
    kept = Verdicts(tmp_path, "flashinfer-python")
    found: list[str] = []

    def fault(trial: Any = "inline") -> str | None:
        return find_flashinfer_fault(
            SHAPES, CPU, trial, kept, measured=lambda each: found.append(each.kernel)
        )

    assert fault() is None
    assert found == ["paged_attention (decode)", "paged_attention (prefill)"]
    # The verdict is of this library at this version.
    assert kept.read(SHAPES, CPU) == (True, None)
    assert Verdicts(tmp_path).read(SHAPES, CPU) == (False, None)
    fake.off = 0.5
    assert fault("cached") is None
    assert "paged_attention (decode) is wrong by" in str(fault())
    assert "found before" in str(fault("cached"))
    fake.faults["run"] = RuntimeError("ninja: build stopped")
    assert "FlashInfer's run: RuntimeError: ninja: build stopped" in str(fault())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(half: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    shapes = replace(SHAPES, head_dim=128, dtype=half, kv_dtype=half)
    assert find_flashinfer_fault(shapes, CUDA, "inline", Verdicts(tmp_path)) is None


def test_plans_in_flight_have_wrappers_of_their_own(fake: FakeFlashInfer) -> None:
    """FlashInfer plans in host memory that is copied later."""
    kernels = flashinfer.FlashInfer(CPU)
    q, cache = torch.zeros(3, 4, 32), torch.zeros(9, 2, 16, 32)
    tables = torch.arange(9, dtype=torch.int32).view(3, 3)
    plans = [kernels.plan(q, cache, tables, [5, 17, 40], [1, 1, 1], 0.25) for _ in range(5)]
    assert len({id(each) for each in plans}) == 4
    assert plans[4] is plans[0]
    assert kernels.plan(q, cache, tables, [5, 17, 40], [1, 1, 1], 0.25, window=8) not in plans


@pytest.mark.parametrize(
    "options", [{"kernels": "torch"}, {"kv": "int8"}, {"kv": "fp8"}, {"deterministic": True}]
)
def test_options_that_exclude_it(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidConfig, match=f"attention.*cannot be with {name}="):
        EngineConfig(attention="flashinfer", **options)
    with pytest.raises(InvalidConfig, match="attention"):
        EngineConfig(attention="flash")  # type: ignore[arg-type]


def test_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*args: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(opening, "load_model", loads)
    config = EngineConfig(attention="flashinfer")
    with pytest.raises(ModelLoadError, match="attention='flashinfer': needs a GPU, this is cpu"):
        open_runner(MODEL_PATH, config, 100)
    monkeypatch.setattr(opening, "choose_device", lambda name: CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r'pip install "asyncinfer\[flashinfer\]"'):
        open_runner(MODEL_PATH, config.replace(dtype="bfloat16"), 100)
    with pytest.raises(ModelLoadError, match=r"needs dtype='float16' or 'bfloat16'"):
        open_runner(MODEL_PATH, config.replace(dtype="float32"), 100)


def test_an_opening_goes_without_what_its_trial_finds_wrong(
    decoder: Decoder, fake: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(attention="flashinfer", kernel_trial="inline")
    assert runner_device.choose_attention(config, SHAPES, CPU) == (config, None)
    fake.off = 0.5
    changed, fault = runner_device.choose_attention(config, SHAPES, CPU)
    assert changed == config.replace(attention="auto")
    with pytest.warns(RuntimeWarning, match="our own kernels attend in place of FlashInfer's"):
        runner = opening.runner_of(decoder, changed.replace(kv_bytes=1 << 20), 55, None, fault)
    assert [each.part for each in runner.fallbacks] == ["attention"]
    assert all(kv.flashinfer is None for kv in runner.kv if isinstance(kv, KVCache))
    # Its workspace is no longer planned for.
    more = activation_bytes(config, decoder.config, torch.float16)
    less = activation_bytes(changed, decoder.config, torch.float16)
    assert more - less == flashinfer.FLASHINFER_BYTES
