"""Formats of the KV cache: what is kept of a number, what a page takes, and that every attention
reads what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from attention.batches import batch_of, scattered_tables
from attention.rounding import poison, rounded
from kernels.interpreted import interpreted

from asyncinfer.attention import (
    AttentionVariant,
    DeviceBatch,
    GatheredAttention,
    KVCache,
    PagedAttention,
    kv_format,
    vector_bytes,
)
from asyncinfer.attention import formats as formats_module
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.invariant import InvariantAttention
from asyncinfer.attention.masked import MaskedAttention
from asyncinfer.attention.scaled import _halves
from asyncinfer.config import KV
from asyncinfer.kernels import triton as triton_twins
from asyncinfer.kernels import twins

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
    assert tuple(formats_module._FORMATS) == get_args(KV)


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
    its = kv_format(kv)
    cache = KVCache.allocate(shape, 5, 16, torch.bfloat16, "cpu", format=its)
    vectors = 2 * parts * 3 * 16
    assert vector_bytes(its, 80, torch.bfloat16) == 84
    assert KVCache.bytes_per_block(shape, 16, torch.bfloat16, its) == vectors * 84
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


Make = Callable[[KVCache, Any, float], Any]


def _invariant(kv: KVCache, batch: Any, scale: float) -> InvariantAttention:
    batch.invariant = True
    return InvariantAttention(kv, batch, scale)


def _masked(kv: KVCache, batch: Any, scale: float) -> MaskedAttention | GatheredAttention:
    """Decode rows; the others, which it does not do, gathered."""
    if batch.decode_rows < batch.rows:
        return GatheredAttention(kv, batch, scale)
    alone = DeviceBatch(
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        query_starts=batch.query_starts,
        slot_mapping=batch.slot_mapping,
        block_size=batch.block_size,
        decode_rows=batch.rows,
    )
    return MaskedAttention(kv, alone, scale)


BACKENDS: dict[str, Make] = {
    "gathered": GatheredAttention,
    "masked": _masked,
    "invariant": _invariant,
    "paged": PagedAttention,
    "triton": PagedAttention,
}
VARIANTS = {
    "plain": None,
    "window": AttentionVariant(window=7),
    "everything": AttentionVariant(window=11, softcap=2.0, sinks=torch.linspace(-2, 3, 6)),
}
#: (sequence, start, count): chunks, a page's border, decode.
STEPS = [
    [(0, 0, 21), (1, 0, 3)],
    [(1, 3, 1), (0, 21, 9)],
    [(0, 30, 1), (1, 4, 1)],
    [(0, 31, 1), (1, 5, 1)],
]


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    if request.param != "triton":
        yield BACKENDS[request.param]
        return
    twin = twins.twin

    def chosen(name: str, tensor: torch.Tensor, reference: bool) -> Any:
        there = name in triton_twins.__all__
        return getattr(triton_twins, name) if there else twin(name, tensor, reference)

    monkeypatch.setattr(twins, "twin", chosen)
    with interpreted():
        yield BACKENDS[request.param]


def right_answer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: AttentionVariant
) -> torch.Tensor:
    """float64 `[tokens, heads, head_dim]` of all tokens of one sequence, one after the other."""
    tokens, heads, _ = q.shape
    k, v = (its.repeat_interleave(heads // its.shape[1], 1) for its in (k, v))
    out = []
    for at in range(tokens):
        first = 0 if variant.window is None else max(0, at - variant.window + 1)
        scores = torch.einsum("hd,khd->hk", q[at].double(), k[first : at + 1]) * scale
        if variant.softcap is not None:
            scores = variant.softcap * (scores / variant.softcap).tanh()
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if variant.sinks is not None:
            total = total + variant.sinks.double().exp()[:, None]
        out.append(torch.einsum("hk,khd->hd", weights / total, v[first : at + 1]))
    return torch.stack(out)


@pytest.mark.parametrize("parts", [2, 1])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kv", SMALL)
def test_every_attention_reads_what_was_written(make: Make, kv: str, name: str, parts: int) -> None:
    variant, lengths = VARIANTS[name], (32, 6)
    numbers = torch.Generator().manual_seed(3)
    heads = 3 - parts
    shape = Shape(num_kv_heads=heads, kv_parts=parts)
    q = [torch.randn(n, 6, 16, generator=numbers) for n in lengths]
    k = [torch.randn(n, heads, 16, generator=numbers) * 3 for n in lengths]
    v = k if parts == 1 else [torch.randn(n, heads, 16, generator=numbers) for n in lengths]
    cache = KVCache.allocate(shape, 14, 4, torch.float32, "cpu", format=kv_format(kv))
    poison(cache)
    tables = scattered_tables(lengths, 14, 4)
    got = [torch.full((n, 6 * 16), torch.nan) for n in lengths]
    for step in STEPS:
        step.sort(key=lambda row: row[2] > 1)
        _, batch = batch_of([row[1:] for row in step], [tables[row[0]] for row in step], 4)
        picked = [[its[s][a : a + n] for s, a, n in step] for its in (q, k, v)]
        attend = make(cache, batch, 0.25)
        out = attend(1, *(torch.cat(its) for its in picked), variant)
        for (sequence, start, count), part in zip(
            step, out.split([row[2] for row in step]), strict=True
        ):
            got[sequence][start : start + count] = part
    for ours, *exact in zip(got, q, k, v, strict=True):
        held = [rounded(its, kv) for its in exact[1:]]
        right = right_answer(exact[0], *held, 0.25, variant or AttentionVariant()).flatten(1)
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-5)
        whole = [its.double() for its in exact[1:]]
        plain = right_answer(exact[0], *whole, 0.25, variant or AttentionVariant()).flatten(1)
        assert (plain - right).abs().max() > 1e-3


@pytest.mark.parametrize("kv", SMALL)
@pytest.mark.parametrize("attention", [GatheredAttention, _invariant, _masked])
def test_nan_of_an_earlier_tenant_poisons_nobody(attention: Make, kv: str) -> None:  # fault 26
    """Numbers and scales behind a row's last token are read, with a weight of zero: the shorter
    row's block is not full. A step that was masked may be followed by one that gathers."""
    cache = KVCache.allocate(Shape(), 6, 4, torch.float32, "cpu", format=kv_format(kv))
    poison(cache)
    for longer, shorter in (
        ((0, 9), (0, 3)),
        ((9, 1), (3, 1)),
        ((10, 1), (4, 1)),
        ((11, 1), (5, 1)),
    ):
        _, batch = batch_of([longer, shorter], [[2, 0, 4], [5, 1]], 4)
        count = longer[1] + shorter[1]
        gathered = attention is _masked and longer[0] == 11
        make = GatheredAttention if gathered else attention
        q, k = torch.ones(count, 6, 16), torch.ones(count, 2, 16)
        torch.testing.assert_close(make(cache, batch, 0.25)(0, q, k, k), torch.ones(count, 96))


def test_a_plain_cache_is_read_as_it_is() -> None:
    cache = KVCache.allocate(Shape(), 3, 4, torch.bfloat16, "cpu")
    assert cache.storage is cache.tensors[0]
    assert (cache.dtype, cache.k_scales, cache.v_scales) == (torch.bfloat16, [None] * 2, [None] * 2)
    assert KVCache.bytes_per_block(Shape(), 4, torch.bfloat16) * 3 == cache.storage.nbytes
