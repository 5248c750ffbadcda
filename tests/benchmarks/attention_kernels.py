"""A decode step's attention and what is written before it, in every format of the cache; and a
prompt's chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.reference.kv_write import quantise
from asyncinfer.kernels.workspace import AttentionWorkspace, decode_parts
from benchmarks.kernel_case import KernelCase

__all__ = ["attention_cases"]

_BLOCK = 16
_EPS = 1e-6
#: Query tokens of a prompt's chunk.
_CHUNK = 256
_FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

Normal = Callable[..., torch.Tensor]


def attention_cases(
    normal: Normal,
    generator: torch.Generator,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    dim: int,
) -> Iterator[KernelCase]:
    """Rows of `context` tokens and one more."""
    pages = -(-(context + 1) // _BLOCK)
    caches = [normal(batch * pages, kv_heads, _BLOCK, dim) for _ in range(2)]
    device = caches[0].device
    order = torch.randperm(batch * pages, generator=generator, device=device)
    tables = order.to(torch.int32).view(batch, pages)
    yield _rope_kv_write(normal, caches, tables, context, heads)
    decode = [(context, 1)] * batch
    q = normal(batch, heads, dim)
    yield _attention("", q, caches, (None, None), tables, decode)
    for name, dtype in _FORMATS.items():
        if dtype is torch.float8_e4m3fn and not _has_fp8(device):
            continue
        held = [quantise(cache, dtype) for cache in caches]
        numbers, scales = zip(*held, strict=True)
        yield _attention(f"{name} ", q, numbers, scales, tables, decode)
    if batch == 1:
        tokens = min(_CHUNK, context)
        q = normal(tokens, heads, dim)
        prompt = [(context + 1 - tokens, tokens)]
        yield _attention(f"prompt of {tokens} ", q, caches, (None, None), tables, prompt)


def _has_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _rope_kv_write(
    normal: Normal, caches: list[torch.Tensor], tables: torch.Tensor, context: int, heads: int
) -> KernelCase:
    k_cache, v_cache = caches
    batch, (_, kv_heads, _, dim) = len(tables), k_cache.shape
    positions = torch.full((batch,), context, dtype=torch.int64, device=tables.device)
    slots = tables[:, context // _BLOCK].long() * _BLOCK + context % _BLOCK
    qkv = normal(batch, heads + 2 * kv_heads, dim)
    angles = positions[:, None, None] * torch.logspace(0, -4, dim // 2, device=tables.device)
    cos = torch.cat((angles.cos(), angles.cos()), -1).float()
    sin = torch.cat((-angles.sin(), angles.sin()), -1).float()
    norm = normal(dim)

    def run() -> list[torch.Tensor]:
        q = ops.rope_kv_write(
            qkv, cos, sin, k_cache, v_cache, slots, q_norm=norm, k_norm=norm, eps=_EPS
        )
        return [q]

    def written() -> list[torch.Tensor]:
        at = (slots // _BLOCK, slice(None), slots % _BLOCK)
        return [k_cache[at], v_cache[at]]

    def exact() -> list[torch.Tensor]:
        q, k, v = torch.split(qkv.double(), [heads, kv_heads, kv_heads], dim=1)
        turned = []
        for x in (q, k):
            x = x / (x.pow(2).mean(-1, keepdim=True) + _EPS).sqrt() * norm.double()
            swapped = torch.cat(tuple(reversed(x.chunk(2, -1))), -1)
            turned.append(x * cos.double() + swapped * sin.double())
        return [*turned, v]

    moved = 2 * qkv.nbytes + cos.nbytes + sin.nbytes
    title = f"rope_kv_write {batch} x {heads}/{kv_heads} x {dim}"
    return KernelCase("rope_kv_write", title, moved, 0, run, exact, written)


def _attention(
    what: str,
    q: torch.Tensor,
    caches: Any,
    scales: Any,
    tables: torch.Tensor,
    rows: list[tuple[int, int]],
) -> KernelCase:
    """Of rows with `(start, count)`: a row's queries see all up to themselves."""
    (k_cache, v_cache), (k_scales, v_scales) = caches, scales
    device, (_, heads, dim) = q.device, q.shape
    kv_heads, width = k_cache.shape[1], tables.shape[1] * _BLOCK
    lengths = [start + count for start, count in rows]
    starts = list(accumulate((count for _, count in rows), initial=0))
    seq_lens, query_starts = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in (lengths, starts)
    )
    decode_rows = len(rows) if rows[0][1] == 1 else 0
    parts = decode_parts(len(rows), kv_heads, width)
    workspace = AttentionWorkspace.allocate(len(rows), heads, dim, parts, device)
    scale = dim**-0.5

    def run() -> list[torch.Tensor]:
        return [
            ops.paged_attention(
                q,
                k_cache,
                v_cache,
                tables,
                seq_lens,
                query_starts,
                scale,
                k_scales=k_scales,
                v_scales=v_scales,
                decode_rows=decode_rows,
                parts=parts,
                workspace=workspace,
            )
        ]

    seen = sum((2 * start + count + 1) * count // 2 for start, count in rows)
    vector = dim * k_cache.element_size() + (0 if k_scales is None else 4)
    return KernelCase(
        "paged_attention",
        f"paged_attention {what}{len(rows)} x {heads}/{kv_heads} x {dim}, context {rows[0][0]}",
        2 * sum(lengths) * kv_heads * vector + 2 * q.nbytes + tables.nbytes,
        4 * heads * seen * dim,
        run,
        partial(_exact_attention, q, caches, scales, tables, rows, scale),
    )


def _exact_attention(
    q: torch.Tensor,
    caches: Any,
    scales: Any,
    tables: torch.Tensor,
    rows: list[tuple[int, int]],
    scale: float,
) -> list[torch.Tensor]:
    first, out = 0, torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for (start, count), blocks in zip(rows, tables.long(), strict=True):
        held = []
        for cache, scale_of in zip(caches, scales, strict=True):
            # As bytes where torch cannot index a dtype.
            plain = cache if cache.dtype.itemsize > 1 else cache.view(torch.int8)
            numbers = plain[blocks].view(cache.dtype).double()
            if scale_of is not None:
                numbers = numbers * scale_of[blocks].double()[..., None]
            held.append(numbers.transpose(0, 1).flatten(1, 2)[:, : start + count])
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[0], dim=0) for tensor in held)
        scores = torch.einsum("qhd,hkd->hqk", q[first : first + count].double(), k) * scale
        at = torch.arange(start + count, device=q.device)
        scores.masked_fill_(at > at[start:, None], -torch.inf)
        out[first : first + count] = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), v)
        first += count
    return [out]
