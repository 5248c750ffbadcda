"""Linear layers in their storage formats."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from asyncinfer.kernels import dispatch, onednn
from asyncinfer.kernels.native import own_blocks_work
from asyncinfer.quantization import (
    NativeWeight,
    ReorderedWeight,
    hold,
    make_linear,
    native_weight,
)
from asyncinfer.quantization.dense import (
    CudaLinear,
    DenseLinear,
    NativeLinear,
    OneDnnLinear,
    has_fused_kernels,
)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_is_the_linear_map(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 40).to(dtype), torch.randn(24, 40).to(dtype)
    b = torch.randn(24).to(dtype) if bias else None
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    got = make_linear(weight.clone(), b)(x)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=10 * tolerance)


def test_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "available", lambda dtype: False)
    weight = torch.randn(3, 4)
    layer = make_linear(weight)
    assert isinstance(layer, DenseLinear)
    assert torch.equal(layer(torch.eye(4)), weight.T)


@pytest.mark.skipif(not onednn.available(torch.float32), reason="torch without oneDNN")
def test_the_plain_weight_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "mkl_is_fast", lambda: False)
    weight = torch.randn(64, 64)
    held = weakref.ref(weight.untyped_storage())
    layer = make_linear(weight)
    assert isinstance(layer, OneDnnLinear)
    del weight
    gc.collect()
    assert held() is None


@pytest.mark.skipif(not onednn.available(torch.float32), reason="torch without oneDNN")
def test_few_tokens_take_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(128, 48), torch.randn(128), torch.randn(9, 48)
    monkeypatch.setattr(onednn, "_native_rows", lambda dtype: 6)
    layer = OneDnnLinear(ReorderedWeight.of(weight.clone()), bias)
    if onednn.blocked(layer.weight, (128, 48)) is None:
        pytest.skip("no kernel for this machine")
    product, rows = onednn.linear, []

    def counting(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[0])
        return product(x, weight, bias)

    monkeypatch.setattr(onednn, "linear", counting)
    for tokens in range(9):
        expected = F.linear(x[:tokens].double(), weight.double(), bias.double())
        torch.testing.assert_close(layer(x[:tokens]).double(), expected, rtol=1e-5, atol=1e-4)
    assert rows == [0, 7, 8]


@pytest.mark.skipif(not onednn.available(torch.float32), reason="torch without oneDNN")
@pytest.mark.parametrize(
    ("shape", "at_home", "expected"),
    [
        ((511, 600), True, DenseLinear),
        ((600, 511), True, DenseLinear),
        ((512, 512), True, OneDnnLinear),
        ((16385, 128), True, OneDnnLinear),
        ((64, 64), False, OneDnnLinear),
    ],
)
def test_small_weights_stay_with_an_mkl_that_is_at_home(
    shape: tuple[int, int], at_home: bool, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "mkl_is_fast", lambda: at_home)
    torch.manual_seed(0)
    weight, x = torch.randn(shape), torch.randn(3, shape[1])
    layer = make_linear(weight.clone())
    assert type(layer) is expected
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(128, 64), (100, 36), (1, 8)])
def test_bfloat16_in_blocks_of_our_own(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own_blocks_work(torch.bfloat16, shape[1]):
        pytest.skip("no kernel for this machine")
    monkeypatch.setattr(onednn, "available", lambda _: False)
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(size, generator=generator).bfloat16()
        for size in (shape, shape[:1], (9, shape[1]))
    )
    # As it may lie in a file, behind an odd number of numbers.
    weight = torch.cat((bias[:1], weight.flatten()))[1:].view(shape)
    held = hold(weight)
    assert isinstance(held, NativeWeight)
    for added in (None, bias):
        layer = make_linear(held, added)
        assert isinstance(layer, NativeLinear)
        for tokens in (0, 1, 9):
            right = F.linear(x[:tokens].double(), weight.double(), bias.double() * (added is bias))
            found = layer(x[:tokens])
            assert found.dtype is torch.bfloat16
            torch.testing.assert_close(found.double(), right, rtol=2e-2, atol=2e-2)


def test_blocks_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_weight, "read_own_blocks", lambda *_: None)
    with pytest.raises(RuntimeError, match="does not read"):
        NativeWeight.at(torch.zeros(64, dtype=torch.uint8), (1, 2), torch.bfloat16)


def test_unknown_format() -> None:
    with pytest.raises(KeyError):
        make_linear(torch.ones(1, 1), storage="int3")


@pytest.mark.parametrize("tokens", [0, 1, 64, 65])
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh"])
def test_a_gpus_layer_with_what_stands_around_it(tokens: int, activation: str | None) -> None:
    """On a CPU both of its ways end in torch, and must mean the same."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(tokens, 16), torch.randn(130, 16), torch.randn(130)
    layer = CudaLinear(weight, bias)
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias))
    norm = torch.randn(16)
    expected = F.linear(F.rms_norm(x, (16,), 1 + norm, 1e-3), weight, bias)
    if activation is not None:
        gates, ups = expected.chunk(2, -1)
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        gates = F.silu(gates) if activation == "silu" else F.gelu(gates, approximate=approximate)
        expected = gates * ups
    residual = torch.randn(expected.shape)
    before = residual.clone()
    got = layer.fused(
        x, norm=norm, eps=1e-3, plus_one=True, activation=activation, residual=residual
    )
    torch.testing.assert_close(got, expected + residual)
    assert torch.equal(residual, before)


def test_kernels_of_our_own_are_for_halves_on_a_gpu_with_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGpu:
        is_cuda = True

        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

    half: Any = OnGpu(torch.bfloat16)
    whole: Any = OnGpu(torch.float32)
    assert has_fused_kernels(half)
    assert not has_fused_kernels(whole)
    assert not has_fused_kernels(torch.ones(1, dtype=torch.bfloat16))
    monkeypatch.setattr(dispatch, "_triton", lambda: None)
    assert not has_fused_kernels(half)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 4, 40, 64, 65])
def test_on_a_gpu(tokens: int) -> None:
    x, weight = torch.randn(tokens, 640).cuda().half(), torch.randn(512, 640).cuda().half() / 25
    layer = make_linear(weight)
    assert isinstance(layer, CudaLinear)
    exact = x.double() @ weight.double().T
    for _ in range(2):
        torch.testing.assert_close(layer(x).double(), exact, rtol=4e-3, atol=4e-3)
    assert isinstance(make_linear(weight.float()), DenseLinear)
