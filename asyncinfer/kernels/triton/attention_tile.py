"""One tile of keys of an online softmax (Milakov and Gimelshein, 2018; FlashAttention-2: Dao,
2023)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_tile", "finished", "load_queries"]

#: exp(x) = exp2(x * LOG2_E). Exponents are kept to base 2, since GPUs have an instruction for exp2.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_queries(
    q, sinks, m, tokens, kv_head, STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The queries `m` `[M]` of one KV head, and the state in which their softmax begins.

    Query `token * GROUP + i` is the `i`-th of the `GROUP` query heads that share the KV head, for
    one of the row's `tokens` query tokens. `q` points at the first of these tokens. Returns the
    queries `[M, D]`, zero beyond the row and beyond `HEAD_DIM`, and three float32 tensors: the sum
    of weighted values `[M, D]`, the largest exponent `[M]`, the sum of weights `[M]`. The softmax
    begins with the head's sink where there are `sinks`.
    """
    d = tl.arange(0, D)
    token, head = m // GROUP, kv_head * GROUP + m % GROUP
    inside = (token < tokens)[:, None] & (d < HEAD_DIM)[None, :]
    at = token.to(tl.int64) * STRIDE + head * HEAD_STRIDE
    queries = tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0)
    if sinks is None:
        peak, total = tl.full(m.shape, float("-inf"), tl.float32), tl.zeros(m.shape, tl.float32)
    else:
        peak, total = tl.load(sinks + head) * LOG2_E, tl.full(m.shape, 1.0, tl.float32)
    return queries, tl.zeros(queries.shape, tl.float32), peak, total


@triton.jit
def attend_tile(
    values, peak, total, queries, position, start, end, table, k_cache, v_cache, k_scales, v_scales,
    kv_head, scale, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    CACHE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr, CACHE_TOKEN_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Add the keys `start .. start + N - 1` of one KV head to the softmax's state, and return it.

    `values`, `peak` and `total` are the state of `load_queries`. Keys from `end` on are left out.
    `queries` `[M, D]` are at `position` `[M]`. `table` points at the row's block table. Caches and
    scales are those of a `KVLayout`. Unless `MASKED`, every query sees every key of the tile.
    """
    at, d = start + tl.arange(0, N), tl.arange(0, D)
    there, wide = at < end, d < HEAD_DIM
    if MASKED:
        block = tl.load(table + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    else:
        block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
    where = block * CACHE_STRIDE + kv_head * CACHE_HEAD_STRIDE
    where += (at % BLOCK_SIZE) * CACHE_TOKEN_STRIDE
    k_at, v_at = k_cache + where[None, :] + d[:, None], v_cache + where[:, None] + d[None, :]
    if MASKED:
        k = tl.load(k_at, mask=there[None, :] & wide[:, None], other=0.0)
        v = tl.load(v_at, mask=there[:, None] & wide[None, :], other=0.0)
    elif HEAD_DIM != D:
        k = tl.load(k_at, mask=wide[:, None], other=0.0)
        v = tl.load(v_at, mask=wide[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)

    # A single product of tf32 would lose float32's precision, and three keep it. Products of
    # 16-bit dtypes ignore this option.
    scores = tl.dot(queries, k.to(queries.dtype), input_precision="tf32x3")
    if k_scales is not None:
        scale_at = (block * KV_HEADS + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE
        scores *= tl.load(k_scales + scale_at, mask=there, other=0.0)[None, :]
    if SOFTCAP is None:
        unit = scale * LOG2_E
    else:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = 2.0 * tl.sigmoid(scores * (scale * (2.0 / SOFTCAP))) - 1.0
        unit = SOFTCAP * LOG2_E
    if MASKED:
        visible = at[None, :] <= position[:, None]
        if WINDOW is not None:
            visible &= at[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))

    highest = tl.maximum(peak, tl.max(scores, axis=1) * unit)
    # A query that has seen no key yet has -inf here. -inf - -inf would be NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores * unit - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, axis=1)
    if v_scales is not None:
        weights *= tl.load(v_scales + scale_at, mask=there, other=0.0)[None, :]
    values = values * shrink[:, None]
    values = tl.dot(
        weights.to(queries.dtype), v.to(queries.dtype), values, input_precision="tf32x3"
    )
    return values, highest, total


@triton.jit
def finished(values, total):
    """The average of the values by their weights `[M, D]`, zero for a query that saw no key."""
    return values / tl.where(total > 0.0, total, 1.0)[:, None]
