"""Batches for paged attention, with every page and slot that no row may read poisoned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Case", "make_case"]


@dataclass(frozen=True)
class Case:
    """The arguments of `paged_attention`, and the right answer."""

    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    #: float64 `[tokens, heads, head_dim]`.
    exact: torch.Tensor

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, **self.options}


def make_case(
    rows: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    scale: float | None = None,
    device: str = "cpu",
    seed: int = 0,
    **options: Any,
) -> Case:
    """`rows`: (length of the sequence, query tokens) each; a row's values depend on `seed` and its
    length alone. Pages lie in random order. Table entries that no query sees are -1; pages without
    an owner, and slots past a row's end or before every window, are NaN (or large, in int8)."""
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    scale = head_dim**-0.5 if scale is None else scale
    counts = [-(-length // block_size) for length, _ in rows]
    blocks, width = sum(counts) + 3, max(counts) + 2
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    shape = (blocks, kv_heads, block_size, head_dim)
    poison = 127 if cache_dtype is torch.int8 else math.nan
    caches = [torch.full(shape, poison).to(cache_dtype) for _ in range(2)]
    scales = [torch.full(shape[:3], math.nan) for _ in range(2)]
    tables = torch.full((len(rows), width), -1, dtype=torch.int32)
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if sinks else None
    queries, answers = [], []
    for row, (length, count) in enumerate(rows):
        randn = torch.Generator().manual_seed(seed + 1000 * length)
        q = torch.randn(count, heads, head_dim, generator=randn).to(dtype)
        first = 0 if window is None else max(0, length - count - window + 1)
        seen = torch.arange(first, length)
        for block in range(first // block_size, counts[row]):
            tables[row, block] = order.pop()
        slots = (tables[row].long()[seen // block_size], seen % block_size)
        dense = []
        for cache, factors in zip(caches, scales, strict=True):
            new = torch.randn(len(seen), kv_heads, head_dim, generator=randn)
            kept, factor = _quantised(new, cache_dtype)
            cache.transpose(1, 2)[slots] = kept
            factors.transpose(1, 2)[slots] = factor
            dense.append(kept.double() * factor.double()[:, :, None])
        queries.append(q)
        answers.append(_exact(q, *dense, seen, length, scale, window, softcap, sink))
    lengths, queried = zip(*rows, strict=True)
    tensors: dict[str, torch.Tensor | None] = {
        "q": torch.cat(queries),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_tables": tables,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "query_starts": torch.tensor((0, *queried)).cumsum(0).int(),
        "sinks": sink,
        "k_scales": scales[0] if cache_dtype is not dtype else None,
        "v_scales": scales[1] if cache_dtype is not dtype else None,
    }
    return Case(
        {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None},
        {"scale": scale, "window": window, "softcap": softcap, **options},
        torch.cat(answers).to(device),
    )


def _quantised(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[tokens, heads, head_dim]` as `dtype`, and what to multiply it with."""
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        return x.to(dtype), torch.ones(x.shape[:2])
    largest = 127.0 if dtype is torch.int8 else 448.0
    factor = x.abs().amax(-1) / largest
    scaled = x / factor[:, :, None]
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), factor


def _exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The definition, in float64, for the keys and values of the tokens `seen`."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->qhk", q.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(length - len(q), length)[:, None]
    visible = seen <= position
    if window is not None:
        visible &= position - seen < window
    weights = scores.exp() * visible[:, None]
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += sinks.double().exp()[:, None]
    return torch.einsum("qhk,khd->qhd", weights, values) / total.clamp(min=1e-300)
