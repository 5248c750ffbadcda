"""Split-KV attention of rows with few query tokens (Flash-Decoding: Dao et al., 2023)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.attention_tile import attend_tile, finished, load_queries
from asyncinfer.kernels.triton.attention_tiling import decode_tiling, device_shared
from asyncinfer.kernels.triton.kv_layout import KVLayout
from asyncinfer.kernels.triton.launched import launched
from asyncinfer.kernels.workspace import AttentionWorkspace

__all__ = ["decode_attention"]


def decode_attention(
    q: torch.Tensor,
    kv: KVLayout,
    sinks: torch.Tensor | None,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    window: int | None,
    softcap: float | None,
    rows: int,
    max_query_len: int,
    parts: int,
    chunk: int,
    workspace: AttentionWorkspace,
) -> None:
    """Attend for the first `rows` rows into `out`. The arguments are those of `paged_attention`.

    A program takes one KV head and one part of the keys that any of a row's queries sees. The
    queries of a program are those of all heads that share the KV head, at all query tokens. All
    rows together have `parts` parts, more than `rows`. Parts without keys come last, and their
    programs end at once. A part has at most `max(chunk, ceil(keys of all rows / (parts - rows)))`
    keys, rounded up to whole tiles. A row's parts have one length, so that a long row among short
    ones is read by as many programs as a long row alone. The last program of a row to end joins the
    row's parts. It joins them in their order, so that the sum does not depend on which one was
    last.
    """
    _, heads, head_dim = q.shape
    group = heads // kv.heads
    queries = group * max_query_len
    tiling = decode_tiling(queries, head_dim, q.dtype, kv.k.dtype, device_shared(q.device))
    grid = (kv.heads, parts, triton.cdiv(queries, tiling.m))
    _decode_attention[grid](
        q, kv.k, kv.v, kv.k_scales, kv.v_scales, sinks, block_tables, seq_lens, query_starts, out,
        workspace.outputs, workspace.lse, workspace.arrivals,
        block_tables.stride(0), rows, parts, chunk, scale,
        SOFTCAP=softcap, WINDOW=window,
        Q_STRIDE=q.stride(0), Q_HEAD_STRIDE=q.stride(1),
        CACHE_STRIDE=kv.k.stride(0), CACHE_HEAD_STRIDE=kv.k.stride(1),
        CACHE_TOKEN_STRIDE=kv.k.stride(2), KV_HEADS=kv.heads, BLOCK_SIZE=kv.k.shape[2],
        GROUP=group, QUERIES=queries, HEAD_DIM=head_dim, D=tiling.d, M=tiling.m, N=tiling.n,
        HELD=tiling.held, JOINED=tiling.joined, ALONE=rows == max_query_len == 1,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


@launched(
    do_not_specialize=("table_stride", "rows", "parts", "chunk"),
    do_not_specialize_on_alignment=("block_tables", "seq_lens", "query_starts"),
)
def _decode_attention(
    q, k_cache, v_cache, k_scales, v_scales, sinks, block_tables, seq_lens, query_starts, out,
    outputs, lse, arrivals, table_stride, rows, parts, chunk, scale,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr, CACHE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr,
    CACHE_TOKEN_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, HELD: tl.constexpr, JOINED: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    kv_head, number, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ALONE:
        # The only row has at most one query token, so no program has to search for its row.
        row = tl.full((), 0, tl.int32)
        first_part, first_token = row, row
        tokens, length = tl.load(query_starts + 1), tl.load(seq_lens)
        largest = _largest_of(_keys(length, tokens, WINDOW), rows, parts, chunk, N)
    else:
        largest = _largest_part(seq_lens, query_starts, rows, parts, chunk, WINDOW, N)
        row, first_part = _row_of(number, seq_lens, query_starts, rows, largest, WINDOW)
        if row == rows:
            return
        first_token = tl.load(query_starts + row)
        tokens = tl.load(query_starts + row + 1) - first_token
        length = tl.load(seq_lens + row)
    part = number - first_part
    first = length - _keys(length, tokens, WINDOW)
    own_parts = _parts(length - first, largest)
    if part >= own_parts:
        return
    size = tl.cdiv(tl.cdiv(length - first, own_parts), N) * N

    m = tile * M + tl.arange(0, M)
    queries, values, peak, total = load_queries(
        q + first_token.to(tl.int64) * Q_STRIDE, sinks, m, tokens, kv_head,
        Q_STRIDE, Q_HEAD_STRIDE, GROUP, HEAD_DIM, D,
    )  # fmt: skip
    if part > 0:
        # The sink counts once, in the first part.
        peak, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    position = length - tokens + m // GROUP
    table = block_tables + row.to(tl.int64) * table_stride
    begin = first + part * size
    end = tl.minimum(begin + size, length)
    for start in range(begin, end, N):
        values, peak, total = attend_tile(
            values, peak, total, queries, position, start, end, table,
            k_cache, v_cache, k_scales, v_scales, kv_head, scale,
            SOFTCAP=SOFTCAP, WINDOW=WINDOW, MASKED=True, CACHE_STRIDE=CACHE_STRIDE,
            CACHE_HEAD_STRIDE=CACHE_HEAD_STRIDE, CACHE_TOKEN_STRIDE=CACHE_TOKEN_STRIDE,
            KV_HEADS=KV_HEADS, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM, D=D, N=N,
        )  # fmt: skip
    values = finished(values, total)

    d = tl.arange(0, D)
    wide = (d < HEAD_DIM)[None, :]
    if own_parts == 1:
        out_at = out + _at_out(first_token, m, kv_head, KV_HEADS, GROUP)[:, None] * HEAD_DIM
        out_there = (m // GROUP < tokens)[:, None] & wide
        tl.store(out_at + d[None, :], values.to(out.dtype.element_ty), mask=out_there)
        return

    # Results of parts are [parts, KV_HEADS, QUERIES].
    mine = (number.to(tl.int64) * KV_HEADS + kv_head) * QUERIES + m
    tl.store(lse + mine, peak + tl.log2(tl.where(total > 0.0, total, 1.0)), mask=m < QUERIES)
    there = (m < QUERIES)[:, None] & wide
    tl.store(outputs + mine[:, None] * HEAD_DIM + d[None, :], values, mask=there)
    # All threads write their parts before one of them counts the program as arrived.
    tl.debug_barrier()
    arrival = arrivals + (row * KV_HEADS + kv_head) * tl.cdiv(QUERIES, M) + tile
    if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") < own_parts - 1:
        return

    tl.store(arrival, 0)
    # A tile has M queries, of which only the first HELD may exist.
    m = tile * M + tl.arange(0, HELD)
    parts_before = number.to(tl.int64) - part
    peak, total = tl.full((HELD,), float("-inf"), tl.float32), tl.zeros((HELD,), tl.float32)
    values = tl.zeros((HELD, D), tl.float32)
    # Parts are read together, since waiting for one takes as long as waiting for all.
    for start in tl.range(0, own_parts, JOINED, num_stages=1):
        each = start + tl.arange(0, JOINED)
        known = (each < own_parts)[:, None] & (m < QUERIES)[None, :]
        at = ((parts_before + each)[:, None] * KV_HEADS + kv_head) * QUERIES + m[None, :]
        # ".cg" bypasses the L1 cache, which does not see writes of other multiprocessors.
        part_lse = tl.load(lse + at, mask=known, other=float("-inf"), cache_modifier=".cg")
        part_values = tl.load(
            outputs + at[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=known[:, :, None] & wide[None, :, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        highest = tl.maximum(peak, tl.max(part_lse, axis=0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink, weights = tl.exp2(peak - base), tl.exp2(part_lse - base[None, :])
        values = values * shrink[:, None] + tl.sum(part_values * weights[:, :, None], axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        peak = highest
    out_at = out + _at_out(first_token, m, kv_head, KV_HEADS, GROUP)[:, None] * HEAD_DIM
    out_there = ((m // GROUP < tokens) & (m < QUERIES))[:, None] & wide
    joined = finished(values, total).to(out.dtype.element_ty)
    tl.store(out_at + d[None, :], joined, mask=out_there)


@triton.jit
def _at_out(first_token, m, kv_head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr):
    """The indices of the queries `m` of a KV head in the output's `[tokens * heads]`."""
    head = kv_head * GROUP + m % GROUP
    return (first_token + m // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head


@triton.jit
def _keys(length, tokens, WINDOW: tl.constexpr):
    """How many keys any query token of a row sees. They are the last of the row's `length`."""
    if WINDOW is None:
        return length
    else:
        return tl.minimum(length, tokens + (WINDOW - 1))


@triton.jit
def _parts(keys, largest):
    """How many parts a row has. A row without keys has one part, which writes zeros."""
    return tl.maximum(tl.cdiv(keys, largest), 1)


@triton.jit
def _keys_of(row, seq_lens, query_starts, rows, WINDOW: tl.constexpr):
    """`_keys` of each of `row` `[n]`, 0 beyond the last row."""
    length = tl.load(seq_lens + row, mask=row < rows, other=0)
    if WINDOW is None:
        return length
    else:
        begin = tl.load(query_starts + row, mask=row < rows, other=0)
        end = tl.load(query_starts + row + 1, mask=row < rows, other=0)
        return _keys(length, end - begin, WINDOW)


@triton.jit
def _largest_part(
    seq_lens, query_starts, rows, parts, chunk, WINDOW: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The most keys of a part, a multiple of `N`. All rows together have at most `parts` parts: up
    to `parts - rows` full ones, and one for each row that is not full."""
    total = 0
    for start in range(0, rows, 128):
        row = start + tl.arange(0, 128)
        total += tl.sum(_keys_of(row, seq_lens, query_starts, rows, WINDOW), axis=0)
    return _largest_of(total, rows, parts, chunk, N)


@triton.jit
def _largest_of(keys, rows, parts, chunk, N: tl.constexpr):
    """`_largest_part` of rows that have `keys` keys together."""
    return tl.cdiv(tl.maximum(tl.cdiv(keys, parts - rows), chunk), N) * N


@triton.jit
def _row_of(part, seq_lens, query_starts, rows, largest, WINDOW: tl.constexpr):
    """The row that a part belongs to, and the number of that row's first part. The row is `rows`
    where the part belongs to none."""
    ended, first, before = 0, 0, 0
    for start in range(0, rows, 128):
        row = start + tl.arange(0, 128)
        keys = _keys_of(row, seq_lens, query_starts, rows, WINDOW)
        count = tl.where(row < rows, _parts(keys, largest), 0)
        over = (row < rows) & (before + tl.cumsum(count, axis=0) <= part)
        ended += tl.sum(over.to(tl.int32), axis=0)
        first += tl.sum(tl.where(over, count, 0), axis=0)
        before += tl.sum(count, axis=0)
    return ended, first
