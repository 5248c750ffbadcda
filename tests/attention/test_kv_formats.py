"""Formats of the KV cache: what is kept of a number, and what a page takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import get_args

import pytest
import torch
from attention.rounding import poison, rounded

from asyncinfer.attention import (
    KVCache,
    kv_format,
    vector_bytes,
)
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.scaled import _halves
from asyncinfer.config import KV

SMALL = ("fp8", "int8")
#: Half a step of the largest number, and half a step of three bits of fraction; a little for the
#: arithmetic.
BOUND = {"int8": 0.5001 / 127, "fp8": 1.001 / 16}


@dataclass
class Shape:
    num_kv_heads: int = 2
    head_dim: int = 16
    num_layers: int = 2
    kv_parts: int = 2
    heads: int = 6


def test_formats_are_those_of_the_option() -> None:
    formats = [kv_format(name) for name in get_args(KV)]
    assert len({*map(id, formats)}) == len(formats)
    with pytest.raises(KeyError):
        kv_format("plane")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv", SMALL)
def test_what_is_read_is_what_was_written_but_for_rounding(kv: str, dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(1)
    values = torch.randn(60, 2, 24, generator=numbers)
    values *= torch.logspace(-4, 4, 60)[:, None, None]
    values[0] = 0.0
    values[1, 0, 1:] = 0.0
    values = values.to(dtype)
    cache = KVCache.allocate(Shape(head_dim=24), 15, 4, dtype, "cpu", format=kv_format(kv))
    poison(cache)
    slots = torch.arange(60)
    for pages, new in cache.encoded(1, values, -values):
        pages[slots // 4, :, slots % 4] = new
    gather = Gather(cache, torch.arange(15)[None])
    read = gather(1, torch.empty(gather.size, dtype=dtype))[:, 0].transpose(1, 2)
    assert read.dtype is dtype
    assert read[1].equal(-read[0])
    right = rounded(values, kv)
    # But for what float32 takes for a tie.
    assert (read[0] != right.to(dtype)).sum() < 0.005 * right.numel()
    exact = values.double()
    largest = exact.abs().amax(-1, keepdim=True)
    size = largest if kv == "int8" else torch.maximum(exact.abs(), largest * 2**-14)
    error = (read[0].double() - exact).abs()
    info = torch.finfo(dtype)
    assert (error <= BOUND[kv] * size + info.eps * (exact.abs() + info.tiny)).all()
    # As far off as that in places: the bound is no looser than it must be.
    assert (error > 0.9 * BOUND[kv] * size).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_four_bits_are_off_by_half_a_step_of_their_group(head_dim: int, dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(1)
    values = torch.randn(60, 2, head_dim, generator=numbers)
    values *= torch.logspace(-3, 2, 60)[:, None, None]
    # A large dimension costs its own group alone.
    values[:, :, -1] *= 50
    values[0] = 0.0
    values[1] = 3.0
    values = values.to(dtype)
    shape = Shape(head_dim=head_dim)
    cache = KVCache.allocate(shape, 15, 4, dtype, "cpu", format=kv_format("int4"))
    poison(cache)
    slots = torch.arange(60)
    for pages, new in cache.encoded(1, values, values.flip(0)):
        pages[slots // 4, :, slots % 4] = new
    gather = Gather(cache, torch.arange(15)[None])
    read = gather(1, torch.empty(gather.size, dtype=dtype))[:, 0].transpose(1, 2)
    assert read[1].equal(read[0].flip(0))
    torch.testing.assert_close(read[0], rounded(values, "int4").to(dtype), rtol=1e-6, atol=0.0)
    assert read[0, :2].equal(values[:2])
    group = gcd(head_dim, 32)
    exact = values.double().unflatten(-1, (-1, group))
    step = (exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)) / 15
    error = (read[0].double().unflatten(-1, (-1, group)) - exact).abs()
    # Half a step, and what float16 and the cache's dtype round.
    slack = 2**-10 * exact.abs().amax(-1, keepdim=True) + torch.finfo(dtype).eps * exact.abs()
    assert (error <= 0.5 * step + slack + 1e-7).all()
    bits = 8 * vector_bytes(kv_format("int4"), head_dim, dtype) / head_dim
    assert bits == 4 + 32 / group
    assert (cache.head_dim, cache.k_scales, cache.v_scales) == (head_dim, [None] * 2, [None] * 2)


def test_four_bits_keep_what_is_no_number_and_bound_what_is_too_large() -> None:
    values = torch.tensor([[1e30, -1e30] * 8, [float("nan")] * 16, [1e-30] * 16])
    codes, ends = kv_format("int4").encode(values)
    out = torch.empty(1, 3, 16)
    kv_format("int4").gather([codes[None], ends[None]], torch.tensor([0]), out)
    assert out[0, 0].abs().sub(65504).abs().max() < 64
    assert out[0, 1].isnan().all()
    assert out[0, 2].abs().max() < 1e-7


def test_bytes_are_turned_into_the_numbers_they_stand_for() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    theirs = every.view(torch.float8_e4m3fn).float()
    ours = _halves(every.view(torch.int8)).float() * 256
    known = theirs.isfinite()
    assert known.sum() == 254
    assert torch.equal(ours[known], theirs[known])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kv", SMALL)
def test_a_page_takes_a_byte_a_number_and_a_scale_a_vector(kv: str, parts: int) -> None:
    shape = Shape(num_kv_heads=3, head_dim=80, kv_parts=parts)
    format = kv_format(kv)
    cache = KVCache.allocate(shape, 5, 16, torch.bfloat16, "cpu", format=format)
    vectors = 2 * parts * 3 * 16
    assert vector_bytes(format, 80, torch.bfloat16) == 84
    assert KVCache.bytes_per_block(shape, 16, torch.bfloat16, format) == vectors * 84
    assert sum(tensor.nbytes for tensor in cache.tensors) == 5 * vectors * 84
    assert cache.dtype is torch.bfloat16
    assert cache.storage.dtype.itemsize == 1
    assert all(tensor.count_nonzero() == 0 for tensor in cache.tensors)
    for scales in (*cache.k_scales, *cache.v_scales):
        assert scales is not None
        assert (scales.shape, scales.is_contiguous()) == ((5, 3, 16), True)


@pytest.mark.parametrize("kv", SMALL)
def test_copied_and_cleared_blocks_are_whole(kv: str) -> None:
    cache = KVCache.allocate(Shape(), 6, 4, torch.float32, "cpu", format=kv_format(kv))
    numbers = torch.Generator().manual_seed(2)
    for tensor in cache.tensors:
        tensor.copy_(torch.randint(-99, 99, tensor.shape, generator=numbers))
    before = [tensor.clone() for tensor in cache.tensors]
    cache.copy_blocks([(0, 1), (1, 2), (4, 5)])
    cache.clear(torch.tensor([3]))
    for tensor, old in zip(cache.tensors, before, strict=True):
        old[:, :, [1, 2, 5]] = old[:, :, [0, 1, 4]]
        old[:, :, 3] = 0
        assert torch.equal(tensor, old)


def test_a_plain_cache_is_read_as_it_is() -> None:
    cache = KVCache.allocate(Shape(), 3, 4, torch.bfloat16, "cpu")
    assert cache.storage is cache.tensors[0]
    assert (cache.dtype, cache.k_scales, cache.v_scales) == (torch.bfloat16, [None] * 2, [None] * 2)
    assert KVCache.bytes_per_block(Shape(), 4, torch.bfloat16) * 3 == cache.storage.nbytes
