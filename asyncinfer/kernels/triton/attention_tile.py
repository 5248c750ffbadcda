"""One tile of keys in a softmax that runs over many (Milakov and Gimelshein, 2018; Dao, 2023)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_tile", "finished", "load_queries"]

#: exp(x) = exp2(x * this): exponents are kept to base 2, which the hardware has.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_queries(
    q, sinks, m, tokens, kv_head, STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The queries numbered `m` of one KV head's, token by token and in a token head by head; and
    where their softmax begins: with the sink alone, or with nothing.

    `q` points at the row's first of `tokens` query tokens. Gives queries `[M, D]`, zero beyond the
    row and the head, and float32 `[M, D]`, `[M]`, `[M]`: sum of weighted values, largest exponent,
    sum of weights.
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
    """Add the keys `start .. start + N - 1` of one KV head, as far as they are below `end`, to the
    state `values`, `peak`, `total`, and return it.

    `queries` `[M, D]` are at `position` `[M]`. `table` points at the row's block table. Unless
    `MASKED`, every query sees every key of the tile.
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

    # Three products of tf32 keep float32's precision, which one would not. Shorter dtypes ignore
    # this.
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
    # A query that has seen no key yet would compute -inf - -inf, which is NaN.
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
    """The softmax's average of the values; zero for a query that saw no key."""
    return values / tl.where(total > 0.0, total, 1.0)[:, None]
