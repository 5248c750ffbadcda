"""The trial of Triton's kernels: it finds those that cannot be run, are wrong, or differ from
themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from kernels.interpreted import interpreted

from asyncinfer.config import EngineConfig, Kernels
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels import dispatch, reference, trial, triton
from asyncinfer.kernels.figures import KernelFigures, Stopwatch
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.trial import Fault, TrialShapes, find_fault
from asyncinfer.kernels.trial_cases import cases
from asyncinfer.runner import device as devices

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


def kernels(**changed: Callable[..., Any]) -> ModuleType:
    """The reference kernels, some of them changed."""
    module = ModuleType("kernels")
    module.__dict__.update(
        {name: getattr(reference, name) for name in triton.__all__ if hasattr(reference, name)}
    )
    module.__dict__.update(changed)
    return module


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.int8),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float8_e4m3fn),
    ],
)
def test_kernels_that_are_right_have_no_fault(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    shapes = dataclasses.replace(SHAPES, dtype=dtype, kv_dtype=kv_dtype)
    assert find_fault(shapes, CPU, kernels()) is None


#: One of each code, by rows, with offsets, in powers of two.
LAYOUTS = (
    WeightLayout("e2m1", 32),
    WeightLayout("e4m3", 0),
    WeightLayout("e4m3", 64),
    WeightLayout("int4", 32, True),
    WeightLayout("int8", 0),
    WeightLayout("int8", 16, True),
    WeightLayout("iq4", 32),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantised_products_are_tried(dtype: torch.dtype) -> None:
    """Of each layout that a model's weights have, for few rows, many, and experts."""
    shapes, heard = dataclasses.replace(SHAPES, dtype=dtype, layouts=LAYOUTS), list[str]()
    assert find_fault(shapes, CPU, kernels(), on_kernel=heard.append) is None
    for layout in LAYOUTS:
        assert sum(name.endswith(f"rows, {layout}") for name in heard) == 5
    for name in ("linear_small", "grouped_linear"):
        right = getattr(reference, name)

        def wrong(*args: Any, right: Any = right, **options: Any) -> torch.Tensor:
            offsets = options.get("offsets")
            if offsets is not None:
                options["offsets"] = -offsets
            found: torch.Tensor = right(*args, **options)
            return found

        fault = find_fault(shapes, CPU, kernels(**{name: wrong}))
        assert fault is not None
        assert f"{name} of" in fault.reason
        assert "int4 in groups of 32" in fault.reason


@pytest.mark.slow
def test_tritons_own_have_none() -> None:
    with interpreted():
        shapes = dataclasses.replace(SHAPES, layouts=LAYOUTS)
        assert find_fault(shapes, CPU) is None


def test_each_kernel_is_timed_where_somebody_asks() -> None:
    heard: list[KernelFigures] = []
    assert find_fault(SHAPES, CPU, kernels(), measured=heard.append) is None
    names = {each.kernel.split()[0] for each in heard}
    assert {"rms_norm", "silu_mul", "linear_small", "kv_write", "paged_attention"} < names
    for each in heard:
        assert 0 <= each.error <= each.allowed
        assert each.seconds is not None
        assert each.seconds > 0
        assert each.floor is not None
        assert each.floor > 0
    # In halves: the reference in float32 is another number.
    assert any(each.error > 0 for each in heard)


def test_floors_are_bytes_over_bandwidth() -> None:
    def wide(x: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
        return x + weight

    module = ModuleType("kernels")
    module.__dict__["wide"] = wide
    watch = Stopwatch(module, CPU)
    x, weight = torch.ones(1000), torch.ones(1000)
    watch.wide(x, weight=weight)
    one = watch.floor
    watch.wide(x, weight=x)
    assert watch.floor == pytest.approx(one * 2 / 3)
    watch.wide(x.repeat(9), weight=torch.ones(9000))
    assert watch.floor == pytest.approx(one * 9)


def test_what_cannot_be_timed_is_still_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("asyncinfer.kernels.figures.DeviceClock", full)
    heard: list[KernelFigures] = []
    assert find_fault(SHAPES, CPU, kernels(), measured=heard.append) is None
    assert {(each.seconds, each.floor) for each in heard} == {(None, None)}


def test_kernels_before_the_first_that_is_wrong_are_measured() -> None:
    heard: list[KernelFigures] = []
    module = kernels(kv_write=one_lane("silu_mul"))
    assert find_fault(SHAPES, CPU, module, measured=heard.append) is not None
    assert [each.kernel for each in heard][:3] == ["rms_norm", "add_rms_norm", "silu_mul"]
    assert "kv_write" not in {each.kernel for each in heard}


def test_every_kernel_is_tried() -> None:
    shapes = dataclasses.replace(SHAPES, layouts=LAYOUTS)
    assert {name.split()[0] for name, _ in cases(shapes, CPU)} == set(triton.__all__)


def test_an_adapter_that_is_read_beyond_its_rank_is_found() -> None:
    def wrong(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        *tensors, ranks, slots = args
        return reference.lora_add(*tensors, ranks + (ranks == 5), slots, **options)

    fault = find_fault(SHAPES, CPU, kernels(lora_add=wrong))
    # What lies beyond a rank may be anything, and other numbers in each run.
    assert "lora_add of 5 rows" in str(fault)


def test_a_gate_by_another_approximation_is_found() -> None:
    """The two differ by little, and a trial in float32 sees that."""

    def wrong(gate_up: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        return reference.gelu_mul(gate_up)

    shapes = dataclasses.replace(SHAPES, dtype=torch.float32, kv_dtype=torch.float32)
    assert "gelu_mul (tanh) is wrong" in str(find_fault(shapes, CPU, kernels(gelu_mul=wrong)))


def one_lane(name: str) -> Callable[..., Any]:
    """A kernel that is wrong in one number."""
    right = getattr(reference, name)

    def wrong(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        first = found[0] if isinstance(found, tuple) else found
        first.view(-1)[-7 if first.numel() > 7 else -1] += 3
        return found

    return wrong


@pytest.mark.parametrize(
    "name",
    [
        *("rms_norm", "silu_mul", "linear_small", "rope_kv_write", "paged_attention", "sample"),
        *("decode_inputs", "add_rms_norm", "gelu_mul", "rope", "lora_add"),
    ],
)
def test_one_wrong_number_is_found(name: str) -> None:
    fault = find_fault(SHAPES, CPU, kernels(**{name: one_lane(name)}))
    assert fault is not None
    assert name in fault.reason
    assert fault.lasting


def test_draws_that_are_written_elsewhere_are_found() -> None:
    def wrong(tokens: Any, peaks: Any, places: torch.Tensor, *rest: Any) -> None:
        reference.keep_draws(tokens, peaks, places + 1, *rest)

    assert "keep_draws is wrong" in str(find_fault(SHAPES, CPU, kernels(keep_draws=wrong)))


def test_a_write_to_the_wrong_slot_is_found() -> None:
    def wrong(k: torch.Tensor, v: torch.Tensor, *rest: Any, **scales: Any) -> None:
        reference.kv_write(k, v.roll(1, dims=0), *rest, **scales)

    assert "kv_write is wrong" in str(find_fault(SHAPES, CPU, kernels(kv_write=wrong)))


def test_a_kernel_that_reads_a_page_of_nobody_is_found() -> None:
    def wrong(q: Any, k: Any, v: Any, tables: Any, lengths: Any, *rest: Any, **options: Any) -> Any:
        # A key more than the last row has.
        lengths = lengths.clone()
        lengths[-1] += 16
        tables = torch.cat((tables, torch.full_like(tables[:, :1], len(k) - 1)), dim=1)
        return reference.paged_attention(q, k, v, tables, lengths, *rest, **options)

    assert "paged_attention" in str(find_fault(SHAPES, CPU, kernels(paged_attention=wrong)))


def test_a_kernel_that_differs_from_itself_is_found() -> None:
    turn = iter(range(100))

    def wrong(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        y = reference.rms_norm(x, *args, **options)
        # The last bit of one number, every other time.
        y[0, 0] *= 1 + next(turn) % 2 * 2**-10
        return y

    fault = find_fault(SHAPES, CPU, kernels(rms_norm=wrong))
    assert fault == Fault("rms_norm gives other numbers when it is run again", lasting=True)


def test_a_kernel_that_cannot_be_made_is_named_by_its_error() -> None:
    def wrong(*args: Any, **options: Any) -> Any:
        raise RuntimeError("Failed\nno C compiler found")

    fault = find_fault(SHAPES, CPU, kernels(silu_mul=wrong))
    # There may be one the next time.
    assert fault == Fault("silu_mul: RuntimeError: no C compiler found", lasting=False)


def test_kernels_run_on_the_device_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.clear()

    def none(shapes: TrialShapes, device: torch.device) -> Iterator[Any]:
        assert current == [device]
        return iter(())

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(trial, "cases", none)
    assert find_fault(SHAPES, torch.device("cuda", 1), kernels()) is None


@pytest.fixture
def choice() -> Iterator[None]:
    yield
    dispatch.use_triton(True)


class OnGpu:
    is_cuda = True


def choose(name: Kernels, device: torch.device = CUDA) -> str | None:
    return devices.choose_kernels(EngineConfig(kernels=name), SHAPES, device)


@pytest.mark.usefixtures("choice")
def test_auto_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor: torch.Tensor = OnGpu()  # type: ignore[assignment]
    monkeypatch.setattr(devices, "find_triton_fault", lambda *_: "rms_norm is wrong")
    assert choose("auto") == "rms_norm is wrong"
    assert dispatch.kernel_for(reference.rms_norm, tensor) is reference.rms_norm
    with pytest.raises(ModelLoadError, match="kernels='triton': rms_norm is wrong"):
        choose("triton")
    monkeypatch.setattr(devices, "find_triton_fault", lambda *_: None)
    # They were wrong for a draft model: the one that it drafts for does without them, too.
    assert choose("auto") == "rms_norm is wrong"
    assert dispatch.kernel_for(reference.rms_norm, tensor) is reference.rms_norm
    dispatch.use_triton(True)
    assert choose("auto") is None
    assert dispatch.kernel_for(reference.rms_norm, tensor) is triton.rms_norm
    assert choose("torch") is None
    assert dispatch.kernel_for(reference.rms_norm, tensor) is reference.rms_norm


@pytest.mark.usefixtures("choice")
def test_amds_gpus_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "never compiled for AMD's GPUs" in str(choose("auto"))


def test_a_cpu_has_one_choice() -> None:
    assert choose("auto", CPU) is None
    assert choose("torch", CPU) is None
    with pytest.raises(ModelLoadError, match="kernels='triton': needs a GPU, this is cpu"):
        choose("triton", CPU)
