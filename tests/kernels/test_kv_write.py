"""Writes to the KV cache, plain and behind qk-norm and rope, against float64; as machine code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernels.compiled import recorded
from kernels.targets import ONE_DTYPE, Target

from asyncinfer.kernels import ops, reference, triton
from asyncinfer.kernels.reference.kv_write import quantise

STORAGE = [None, torch.int8, torch.float8_e4m3fn]
LIMIT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: How far a stored value may lie from its own: half a step of the largest, an eighth of a power.
STEP = {torch.int8: 0.51 / 127, torch.float8_e4m3fn: 0.52 / 8}
#: Heads, KV heads and head dimension: every head dimension, grouped queries and odd counts.
SHAPES = [(1, 1, 64), (3, 3, 80), (4, 2, 96), (8, 1, 128), (14, 2, 64), (6, 3, 256)]
BLOCK_SIZE, NUM_BLOCKS = 4, 5


class Caches:
    """Keys and values of one layer in poisoned pages, seen through a larger allocation."""

    def __init__(
        self, target: Target, kv_heads: int, head_dim: int, storage: torch.dtype | None
    ) -> None:
        shape = (2, 3, NUM_BLOCKS, kv_heads, BLOCK_SIZE, head_dim)
        self.quantised = storage is not None
        self.kv = torch.full(shape, math.nan, device=target.device).to(storage or target.dtype)
        if storage is torch.int8:
            self.kv.fill_(-128)
        self.kv = self.kv.permute(1, 0, 2, 3, 4, 5)[1]
        self.scales = torch.full((2, *shape[2:5]), math.nan, device=target.device)

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv[0], self.kv[1]

    @property
    def options(self) -> dict[str, Any]:
        if not self.quantised:
            return {}
        return {"k_scales": self.scales[0], "v_scales": self.scales[1]}

    def check(self, target: Target, slots: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
        """Each token's keys and values lie at its slot, and nothing else was touched."""
        untouched = torch.ones(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool, device=target.device)
        for token, slot in enumerate(slots):
            if slot < 0:
                continue
            at = (slot // BLOCK_SIZE, slice(None), slot % BLOCK_SIZE)
            untouched[at[0], at[2]] = False
            for kv, scales, exact in zip(self.kv, self.scales, (k[token], v[token]), strict=True):
                stored = kv.double()[at]
                if not self.quantised:
                    target.check(stored, exact)
                    continue
                largest = exact.abs().amax(-1)
                target.check(scales[at] * LIMIT[kv.dtype], largest)
                error = (stored * scales[at][:, None].double() - exact).abs()
                # Of the largest for int8; for fp8 of each value, down to its smallest step.
                size = largest[:, None].expand_as(exact)
                if kv.dtype is torch.float8_e4m3fn:
                    size = torch.maximum(exact.abs(), size / 448 * 2**-6)
                bound = size * STEP[kv.dtype] + largest[:, None] * target.tolerance
                assert (error <= bound).all()
        for kv, scales in zip(self.kv, self.scales, strict=True):
            rest = kv.transpose(1, 2)[untouched]
            assert (rest == -128).all() if kv.dtype is torch.int8 else rest.float().isnan().all()
            assert scales.transpose(1, 2)[untouched].isnan().all()


def angles(target: Target, tokens: int, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(tokens, 1, rotary // 2, device=target.device)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor | None, plus_one: bool
) -> torch.Tensor:
    """In float64 and, for the rotation, with complex numbers."""
    x, rotary = x.double(), cos.shape[-1]
    if norm is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (norm.double() + plus_one)
    first, second = x[..., :rotary].chunk(2, -1)
    half = rotary // 2
    angle = torch.complex(cos[..., half:].double(), sin[..., half:].double())
    pairs = torch.complex(first, second) * angle
    return torch.cat((pairs.real, pairs.imag, x[..., rotary:]), -1)


@pytest.mark.parametrize("storage", STORAGE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_kv_write(
    target: Target, heads: int, kv_heads: int, head_dim: int, storage: torch.dtype | None
) -> None:
    slots = [9, -1, 0, 19, 7, -1]
    packed = target.randn(len(slots), 2 * kv_heads + heads, head_dim)
    k, v = packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    for module in (triton, ops):
        caches = Caches(target, kv_heads, head_dim, storage)
        at = torch.tensor(slots, device=target.device)
        module.kv_write(k, v, *caches.arguments, at, **caches.options)
        caches.check(target, slots, k.double(), v.double())


@pytest.mark.parametrize("storage", STORAGE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("norm", ["", "qk_norm", "plus_one"])
@pytest.mark.parametrize("target", ONE_DTYPE, indirect=True)
def test_rope_kv_write(
    target: Target,
    heads: int,
    kv_heads: int,
    head_dim: int,
    storage: torch.dtype | None,
    norm: str,
) -> None:
    slots = [9, -1, 0]
    qkv = target.randn(len(slots), 2 * kv_heads + heads, head_dim)
    cos, sin = angles(target, len(slots), head_dim)
    weights = target.randn(2, head_dim) if norm else [None, None]
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    for module in (triton, ops):
        caches = Caches(target, kv_heads, head_dim, storage)
        got = module.rope_kv_write(
            qkv,
            cos,
            sin,
            *caches.arguments,
            torch.tensor(slots, device=target.device),
            q_norm=weights[0],
            k_norm=weights[1],
            eps=1e-5,
            plus_one=norm == "plus_one",
            **caches.options,
        )
        assert got.dtype is target.dtype
        target.check(got, turned(q, cos, sin, weights[0], norm == "plus_one"))
        exact = turned(k, cos, sin, weights[1], norm == "plus_one")
        caches.check(target, slots, exact, v.double())


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(0, 2, 64), (1, 1, 2), (3, 5, 80)])
def test_rope(target: Target, tokens: int, heads: int, head_dim: int) -> None:
    wide = target.randn(tokens, heads + 3, head_dim + 4)
    cos, sin = angles(target, tokens, head_dim)
    across = target.randn(tokens, head_dim, heads).transpose(1, 2)
    for x in (wide[:, 1 : heads + 1, :head_dim], across):
        for module in (triton, ops):
            y = module.rope(x, cos, sin)
            assert y.dtype is target.dtype
            target.check(y, turned(x, cos, sin, None, False))


@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 16), (80, 32), (96, 48), (128, 2)])
def test_partial_rope(target: Target, head_dim: int, rotary: int) -> None:
    qkv = target.randn(2, 4, head_dim)
    cos, sin = angles(target, 2, rotary)
    for module in (triton, ops):
        caches = Caches(target, 1, head_dim, None)
        at = torch.tensor([3, 12], device=target.device)
        got = module.rope_kv_write(qkv, cos, sin, *caches.arguments, at)
        target.check(got, turned(qkv[:, :2], cos, sin, None, False))
        caches.check(
            target, [3, 12], turned(qkv[:, 2:3], cos, sin, None, False), qkv[:, 3:].double()
        )


def test_no_tokens(target: Target) -> None:
    caches = Caches(target, 2, 64, None)
    none = torch.empty(0, dtype=torch.int64, device=target.device)
    angle = torch.empty(0, 1, 64, device=target.device)
    for module in (triton, ops):
        q = module.rope_kv_write(target.randn(0, 8, 64), angle, angle, *caches.arguments, none)
        assert q.shape == (0, 4, 64)
        module.kv_write(target.randn(0, 2, 64), target.randn(0, 2, 64), *caches.arguments, none)
    caches.check(target, [], *torch.empty(2, 0))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_head_of_zeros_and_of_extremes(target: Target, dtype: torch.dtype) -> None:
    caches = Caches(target, 3, 64, dtype)
    k = torch.zeros(1, 3, 64, device=target.device, dtype=target.dtype)
    k[0, 1, 5], k[0, 1, 6] = 60000.0, -60000.0
    k[0, 2] = max(torch.finfo(target.dtype).smallest_normal, 1e-25)
    at = torch.tensor([0], device=target.device)
    triton.kv_write(k, k, *caches.arguments, at, **caches.options)
    caches.check(target, [0], k.double(), k.double())
    assert (caches.kv[0].double()[0, 0, 0] == 0).all()
    assert caches.kv[0].double()[0, 1, 0, 5:7].abs().eq(LIMIT[dtype]).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_as_the_twin_does(target: Target, dtype: torch.dtype) -> None:
    ours, theirs = Caches(target, 2, 64, dtype), Caches(target, 2, 64, dtype)
    k, at = target.randn(6, 2, 64), torch.arange(6, device=target.device)
    # Ties: multiples of half a step.
    k[0] = torch.arange(64, device=target.device) - 0.5
    k[0, :, 0] = 127
    triton.kv_write(k, k, *ours.arguments, at, **ours.options)
    reference.kv_write(k, k, *theirs.arguments, at, **theirs.options)
    assert torch.equal(ours.kv.view(torch.int8), theirs.kv.view(torch.int8))
    assert torch.equal(ours.scales.nan_to_num(), theirs.scales.nan_to_num())
    values, scales = quantise(k, dtype)
    assert values.dtype is dtype
    assert scales.shape == (6, 2)


@pytest.mark.parametrize(
    ("storage", "head_dim", "capability"),
    [
        (torch.bfloat16, 80, 90),
        (torch.bfloat16, 128, 80),
        (torch.bfloat16, 256, 90),
        (torch.int8, 128, 80),
        # GPUs before capability 89 have no float8.
        (torch.float8_e4m3fn, 128, 90),
    ],
    ids=str,
)
def test_compiled(storage: torch.dtype, head_dim: int, capability: int) -> None:
    heads, kv_heads, tokens = 32, 8, 3

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    qkv = empty(tokens, heads + 2 * kv_heads, head_dim)
    caches = empty(2, 100, kv_heads, 16, head_dim, dtype=storage)
    scales = empty(2, 100, kv_heads, 16, dtype=torch.float32)
    quantised = storage is not torch.bfloat16
    options = {"k_scales": scales[0], "v_scales": scales[1]} if quantised else {}
    angle = empty(tokens, 1, head_dim, dtype=torch.float32)
    slots, norm = empty(tokens, dtype=torch.int64), empty(head_dim)
    with recorded() as launches:
        triton.rope_kv_write(qkv, angle, angle, *caches, slots, q_norm=norm, k_norm=norm, **options)
        triton.kv_write(qkv[:, :8], qkv[:, 8:16], *caches, slots, **options)
        triton.rope(qkv, angle, angle)
    assert [launch.name for launch in launches] == ["_rope_kv_write", "_kv_write", "_rope"]
    for launch in launches:
        code = launch.compile(capability)
        assert code.spills == 0
        assert code.fits
        # Of a quantised tile a thread has 8 bytes, else 16.
        if launch.name == "_rope":
            loads, halves, wholes = 2, 0, 1
        elif launch.name == "_kv_write":
            # One path, with the cache to choose.
            loads, halves, wholes = 1, int(quantised), int(not quantised)
        else:
            # Queries, keys and values in code of their own; queries and keys read twice.
            loads, halves, wholes = (5, 2, 1) if quantised else (5, 0, 3)
        # Cosines and sines come as 16 bytes too, where a thread's part of a row is that wide.
        assert code.count("LDG.E.128") >= loads
        assert (code.count("STG.E.64"), code.count("STG.E.128")) == (halves, wholes)
