"""Linear layers in their storage formats."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from asyncinfer.kernels import onednn
from asyncinfer.quantization import make_linear
from asyncinfer.quantization.dense import DenseLinear, OneDnnLinear


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
def test_the_plain_weight_is_let_go() -> None:
    weight = torch.randn(64, 64)
    held = weakref.ref(weight.untyped_storage())
    layer = make_linear(weight)
    assert isinstance(layer, OneDnnLinear)
    del weight
    gc.collect()
    assert held() is None


def test_unknown_format() -> None:
    with pytest.raises(KeyError):
        make_linear(torch.ones(1, 1), storage="int3")
