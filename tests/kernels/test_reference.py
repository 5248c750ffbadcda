"""The reference twins against closed forms in float64, and the checks at their door."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from asyncinfer.kernels import ops

DTYPES = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.bfloat16, 2e-2, id="bfloat16"),
]


@pytest.fixture
def randn(seed: int) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rms_norm(randn: Callable[..., torch.Tensor], dtype: torch.dtype, tolerance: float) -> None:
    x, weight = randn(5, 96).to(dtype), randn(96).to(dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    y = ops.rms_norm(x, weight, 1e-5)
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rope_turns_each_pair(
    randn: Callable[..., torch.Tensor], dtype: torch.dtype, tolerance: float
) -> None:
    x, angles = randn(4, 3, 10).to(dtype), randn(4, 1, 5)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    first, second = x.double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(
        torch.ones(4, 1, 5).double(), angles.double()
    )
    y = ops.rope(x, cos, sin)
    assert y.dtype is dtype
    exact = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)


def test_rope_of_a_slice_leaves_its_input(randn: Callable[..., torch.Tensor]) -> None:
    qkv = randn(4, 5, 8)
    before = qkv.clone()
    y = ops.rope(qkv[:, :3], torch.ones(4, 1, 8), torch.zeros(4, 1, 8))
    assert torch.equal(qkv, before)
    assert torch.equal(y, before[:, :3])


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_silu_mul(randn: Callable[..., torch.Tensor], dtype: torch.dtype, tolerance: float) -> None:
    packed = randn(7, 12).to(dtype)
    gate, up = packed.double().chunk(2, -1)
    y = ops.silu_mul(packed)
    assert y.dtype is dtype
    exact = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)


def test_kv_write_touches_its_slots_only(randn: Callable[..., torch.Tensor]) -> None:
    k_cache = torch.full((3, 2, 4, 6), math.nan)
    v_cache = k_cache.clone()
    k, v = randn(3, 2, 6), randn(3, 2, 6)
    slots = [9, 0, 7]
    ops.kv_write(k, v, k_cache, v_cache, torch.tensor(slots))
    for cache, new in ((k_cache, k), (v_cache, v)):
        for token, slot in enumerate(slots):
            assert torch.equal(cache[slot // 4, :, slot % 4], new[token])
        assert cache.isnan().sum() == cache.numel() - new.numel()


def test_paged_attention_by_hand(randn: Callable[..., torch.Tensor]) -> None:
    heads, kv_heads, dim, size = 4, 2, 6, 3
    k_cache = torch.full((9, kv_heads, size, dim), math.nan)
    v_cache = k_cache.clone()
    tables, lengths, counts = [[7, 2, -1], [4, 0, 5], [1, -1, -1]], [4, 8, 3], [1, 3, 3]
    keys, values, q = randn(3, 9, kv_heads, dim), randn(3, 9, kv_heads, dim), randn(7, heads, dim)
    for row, table in enumerate(tables):
        for at in range(lengths[row]):
            k_cache[table[at // size], :, at % size] = keys[row, at]
            v_cache[table[at // size], :, at % size] = values[row, at]
    got = ops.paged_attention(
        q,
        k_cache,
        v_cache,
        torch.tensor(tables, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor([0, 1, 4, 7], dtype=torch.int32),
        0.3,
    )
    token = 0
    for row, count in enumerate(counts):
        for at in range(lengths[row] - count, lengths[row]):
            for head in range(heads):
                seen = keys[row, : at + 1, head // 2].double()
                weights = (seen @ q[token, head].double() * 0.3).softmax(0)
                exact = weights @ values[row, : at + 1, head // 2].double()
                torch.testing.assert_close(got[token, head].double(), exact, rtol=1e-5, atol=1e-6)
            token += 1


REFUSED: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: ops.rms_norm(torch.ones(2, 3), torch.ones(4), 1e-5),
    "add_rms_norm": lambda: ops.add_rms_norm(torch.ones(2, 3), torch.ones(3), torch.ones(3), 1e-5),
    "rope": lambda: ops.rope(torch.ones(2, 1, 4), torch.ones(2, 4), torch.ones(2, 4)),
    "silu_mul": lambda: ops.silu_mul(torch.ones(2, 3)),
    "gelu_mul": lambda: ops.gelu_mul(torch.ones(2, 3)),
    "linear_small": lambda: ops.linear_small(torch.ones(2, 3), torch.ones(4, 2)),
    "kv_write": lambda: ops.kv_write(
        *(torch.ones(2, 1, 4),) * 2, *(torch.ones(1, 1, 4, 4),) * 2, torch.zeros(3).long()
    ),
    "rope_kv_write": lambda: ops.rope_kv_write(
        torch.ones(2, 3, 4),
        *(torch.ones(2, 1, 6),) * 2,
        *(torch.ones(1, 1, 4, 4),) * 2,
        torch.zeros(2).long(),
    ),
    "paged_attention": lambda: ops.paged_attention(
        torch.ones(1, 3, 4),
        *(torch.ones(1, 2, 4, 4),) * 2,
        torch.zeros(1, 1).int(),
        torch.ones(1).int(),
        torch.tensor([0, 1]).int(),
        1.0,
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"kernel {name}: shapes or dtypes"):
        REFUSED[name]()


def test_every_kernel_is_behind_the_door() -> None:
    from asyncinfer.kernels import reference, triton

    assert sorted(ops.__all__) == sorted(reference.__all__)
    assert set(triton.__all__) <= set(ops.__all__)
