"""Layers whose weights stay in 4 or 8 bits on a GPU, here by the kernels' reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels.compiled import recorded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncinfer.kernels import dispatch
from asyncinfer.kernels.linear_tiles import SMALL_TOKENS
from asyncinfer.quantization import QuantisedWeight, make_grouped_linear, make_linear
from asyncinfer.quantization import cuda_packed as module
from asyncinfer.quantization.cuda_packed import CudaPackedLinear, PackedGrouped, kernels_read
from asyncinfer.quantization.fp8 import CudaFp8Linear, in_e4m3
from asyncinfer.quantization.int4 import quantised_4_bits
from asyncinfer.quantization.int8 import in_8_bits

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def made(*shape: int, group: int = 32, offsets: bool = True) -> QuantisedWeight:
    rows = quantised_4_bits(torch.randn(shape).flatten(0, -2) / 8, group)
    weight = rows.view(*shape[:-1])
    if offsets:
        return weight
    return QuantisedWeight(weight.numbers, weight.scales, None, weight.dtype)


def coded(code: str, group: int, *, offsets: bool = False) -> QuantisedWeight:
    """Random numbers of a code, `[24, 64]`."""
    if code in ("int8", "e4m3"):
        numbers = torch.randint(-126, 127, (24, 64)).to(torch.int8)
        numbers = torch.where((numbers & 127) == 127, 0, numbers)
    else:
        numbers = torch.randint(256, (24, 32)).to(torch.uint8)
    scales = torch.rand(24, 64 // group) / 64
    named = "int" if code.startswith("int") else code
    shifts = torch.rand_like(scales) if offsets else None
    return QuantisedWeight(numbers, scales, shifts, torch.float32, named)


FORMATS = {
    "int4 with offsets": lambda: made(24, 64),
    "int4": lambda: made(24, 64, offsets=False),
    "MXFP4": lambda: replace(coded("e2m1", 32), scales=torch.rand(24, 2).log2().ceil().exp2()),
    "NVFP4": lambda: coded("e2m1", 16),
    "IQ4": lambda: coded("iq4", 32),
    "int8 by rows": lambda: coded("int8", 64),
    "int8 with offsets": lambda: coded("int8", 32, offsets=True),
    "int8 by rows with offsets": lambda: coded("int8", 64, offsets=True),
    "fp8 by rows": lambda: coded("e4m3", 64),
    "fp8 by blocks": lambda: coded("e4m3", 32),
}


@pytest.mark.parametrize("tokens", [1, SMALL_TOKENS, SMALL_TOKENS + 1])
@pytest.mark.parametrize("name", FORMATS)
def test_products(tokens: int, name: str) -> None:
    weight, bias, x = FORMATS[name](), torch.randn(24), torch.randn(tokens, 64)
    # Scales are rounded to float16.
    for factors in (weight.scales, *(() if weight.offsets is None else (weight.offsets,))):
        if weight.group < weight.inputs or weight.offsets is not None:
            factors.copy_(factors.half())
    exact = F.linear(x, weight.dequantised(), bias)
    layer = CudaPackedLinear(weight, bias)
    torch.testing.assert_close(layer(x), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        CudaPackedLinear(weight, None)(x), exact - bias, rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("tokens", [3, SMALL_TOKENS + 6])
def test_what_stands_around_the_layer(tokens: int) -> None:
    weight, x = made(24, 64), torch.randn(tokens, 64)
    layer, norm, added = CudaPackedLinear(weight, None), torch.rand(64), torch.randn(tokens, 24)
    exact = F.linear(F.rms_norm(x, (64,), norm, 1e-6), weight.dequantised())
    torch.testing.assert_close(layer.fused(x, norm=norm, residual=added.clone()), exact + added)
    gates, ups = exact.chunk(2, -1)
    torch.testing.assert_close(layer.fused(x, norm=norm, activation="silu"), F.silu(gates) * ups)


class Sizes(TorchDispatchMode):
    """How many elements what torch makes has."""

    def __init__(self) -> None:
        super().__init__()
        self.found = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.found.append(made.numel())
        return made


@pytest.mark.parametrize("quantise", [in_8_bits, in_e4m3, lambda it: quantised_4_bits(it, 32)])
def test_many_tokens_read_the_numbers_too(
    quantise: Callable[[torch.Tensor], QuantisedWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's product is one launch, and no floats are written of the weight's numbers."""
    monkeypatch.setattr(dispatch, "has_triton_kernel", lambda *_: True)
    weight = torch.randn(256, 128)
    layer = CudaPackedLinear(quantise(weight), None)
    x = torch.empty(SMALL_TOKENS + 1, 128, dtype=torch.bfloat16)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.inference_mode(),
        recorded() as launches,
        Sizes() as sizes,
    ):
        layer(x)
    assert len(launches) == 1
    assert max(sizes.found) < weight.numel()


def test_experts() -> None:
    weight, bias, x = made(3, 10, 64), torch.randn(3, 10), torch.randn(7, 64)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    floats = weight.dequantised()
    right = torch.cat([F.linear(x[:2], floats[0], bias[0]), F.linear(x[2:], floats[2], bias[2])])
    for layer in (PackedGrouped(weight, bias), make_grouped_linear(weight, bias)):
        torch.testing.assert_close(layer(x, ends), right, rtol=1e-4, atol=1e-4)


def test_a_layer_takes_the_bytes_of_its_numbers() -> None:
    """Scales are in a byte where they are powers of two, and else in two."""
    sizes = {"MXFP4": 32 + 2, "int4 with offsets": 32 + 4 + 4, "fp8 by rows": 64 + 4}
    for name, right in sizes.items():
        layer = CudaPackedLinear(FORMATS[name](), None)
        held = (layer.weight, layer.scales, layer.offsets)
        assert sum(tensor.nbytes for tensor in held if tensor is not None) == 24 * right
    # These would be subnormal numbers of float16, or none.
    for scale in (1e-5, 1e5):
        weight = replace(coded("int4", 32), scales=torch.full((24, 2), scale))
        found = CudaPackedLinear(weight, None).scales
        assert found is not None
        assert torch.equal(found, weight.scales)


def test_what_the_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "on_gpu", lambda weight: True)
    assert all(kernels_read(make()) for make in FORMATS.values())
    assert kernels_read(coded("e4m3", 16))
    assert not kernels_read(coded("e4m3", 8))
    assert not kernels_read(coded("nf4", 32))


@pytest.mark.parametrize("storage", ["int8", "fp8", "int4"])
def test_layers_of_a_gpu(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which class holds a weight, floats and numbers, and that the seam computes with it."""
    for where in ("int8", "fp8", "cuda_packed"):
        monkeypatch.setattr(f"asyncinfer.quantization.{where}.on_gpu", lambda weight: True)
    weight, x = torch.randn(24, 64), torch.randn(70, 64)
    numbers = {
        "int8": in_8_bits,
        "fp8": in_e4m3,
        "int4": lambda floats: quantised_4_bits(floats, 32),
    }[storage](weight)
    layers = make_linear(weight.clone(), storage=storage), make_linear(numbers)
    for layer in layers:
        assert isinstance(layer, CudaPackedLinear)
        assert isinstance(layer, CudaFp8Linear) == (storage == "fp8")
        torch.testing.assert_close(layer(x), F.linear(x, numbers.dequantised()))


def test_only_a_gpu_with_halves_has_the_kernels() -> None:
    assert not kernels_read(made(4, 64))
    assert not kernels_read(made(4, 64).to(torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 65, 300])
@pytest.mark.parametrize("storage", ["int4", "int4-128"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])
def test_on_a_gpu(tokens: int, storage: str, device: str) -> None:
    x = torch.randn(tokens, 640, device=device).half()
    weight = torch.randn(512, 640, device=device).half() / 25
    layer = make_linear(weight.clone(), storage=storage)
    assert isinstance(layer, CudaPackedLinear)
    group = 32 if storage == "int4" else 128
    exact = x.double() @ quantised_4_bits(weight, group).dequantised(torch.float64).T
    for _ in range(2):
        torch.testing.assert_close(layer(x).double(), exact, rtol=4e-3, atol=4e-3)
    experts = make_grouped_linear(weight.view(4, 128, 640).clone(), storage=storage)
    assert isinstance(experts, PackedGrouped)
