"""Attention of rows with few query tokens: each row's keys are shared out over several programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.attention_tile import attend_tile, finished, load_queries
from asyncinfer.kernels.triton.attention_tiling import decode_tiling, device_shared
from asyncinfer.kernels.triton.kv_layout import KVLayout
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
    splits: int,
    chunk: int,
    workspace: AttentionWorkspace,
) -> None:
    """Attend for the first `rows` rows into `out`.

    A program takes one row, one KV head and one of `splits` parts of the keys: chunks of
    `max(chunk, ceil(n / splits))`, rounded up to whole tiles, of the n keys that any of the row's
    queries sees. The queries of all heads that share the KV head, of all query tokens, are the rows
    of its products. Parts without keys end at once; of the others, the one that ends last joins
    them, in their order, so that nothing depends on which it was.
    """
    _, heads, head_dim = q.shape
    group = heads // kv.heads
    queries = group * max_query_len
    tiling = decode_tiling(queries, head_dim, q.dtype, device_shared(q.device))
    grid = (rows, kv.heads, splits * triton.cdiv(queries, tiling.m))
    _decode_attention[grid](
        q, kv.k, kv.v, kv.k_scales, kv.v_scales, sinks, block_tables, seq_lens, query_starts, out,
        workspace.outputs, workspace.lse, workspace.arrivals,
        block_tables.stride(0), splits, chunk, scale,
        SOFTCAP=softcap, WINDOW=window,
        Q_STRIDE=q.stride(0), Q_HEAD_STRIDE=q.stride(1),
        CACHE_STRIDE=kv.k.stride(0), CACHE_HEAD_STRIDE=kv.k.stride(1),
        CACHE_TOKEN_STRIDE=kv.k.stride(2), KV_HEADS=kv.heads, BLOCK_SIZE=kv.k.shape[2],
        GROUP=group, QUERIES=queries, HEAD_DIM=head_dim, D=tiling.d, M=tiling.m, N=tiling.n,
        JOIN_STAGES=tiling.join_stages, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=("table_stride", "splits", "chunk"),
    do_not_specialize_on_alignment=("block_tables", "seq_lens", "query_starts"),
)
def _decode_attention(
    q, k_cache, v_cache, k_scales, v_scales, sinks, block_tables, seq_lens, query_starts, out,
    outputs, lse, arrivals, table_stride, splits, chunk, scale,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr, CACHE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr,
    CACHE_TOKEN_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, JOIN_STAGES: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0), tl.program_id(1)
    split, tile = tl.program_id(2) % splits, tl.program_id(2) // splits
    length = tl.load(seq_lens + row)
    first_token = tl.load(query_starts + row)
    tokens = tl.load(query_starts + row + 1) - first_token
    first = 0
    if WINDOW is not None:
        first = tl.maximum(length - tokens - WINDOW + 1, 0)
    size = tl.cdiv(tl.maximum(tl.cdiv(length - first, splits), chunk), N) * N
    # A row without keys has one part, which writes zeros.
    parts = tl.maximum(tl.cdiv(length - first, size), 1)
    if split >= parts:
        return

    m = tile * M + tl.arange(0, M)
    queries, values, peak, total = load_queries(
        q + first_token.to(tl.int64) * Q_STRIDE, sinks, m, tokens, kv_head,
        Q_STRIDE, Q_HEAD_STRIDE, GROUP, HEAD_DIM, D,
    )  # fmt: skip
    if split > 0:
        # The sink counts once.
        peak, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    position = length - tokens + m // GROUP
    table = block_tables + row.to(tl.int64) * table_stride
    begin = first + split * size
    end = tl.minimum(begin + size, length)
    for start in range(begin, end, N):
        values, peak, total = attend_tile(
            values, peak, total, queries, position, start, end, table, k_cache, v_cache, k_scales,
            v_scales, kv_head, scale, SOFTCAP, WINDOW, True, CACHE_STRIDE, CACHE_HEAD_STRIDE,
            CACHE_TOKEN_STRIDE, KV_HEADS, BLOCK_SIZE, HEAD_DIM, D, N,
        )  # fmt: skip
    values = finished(values, total)

    d = tl.arange(0, D)
    wide = (d < HEAD_DIM)[None, :]
    head = kv_head * GROUP + m % GROUP
    out_at = (first_token + m // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head
    out_at = out + out_at[:, None] * HEAD_DIM + d[None, :]
    out_there = (m // GROUP < tokens)[:, None] & wide
    if parts == 1:
        tl.store(out_at, values.to(out.dtype.element_ty), mask=out_there)
        return

    # [rows, kv_heads, splits, QUERIES]
    group_of_parts = (row * KV_HEADS + kv_head).to(tl.int64) * splits
    mine = (group_of_parts + split) * QUERIES + m
    tl.store(lse + mine, peak + tl.log2(tl.where(total > 0.0, total, 1.0)), mask=m < QUERIES)
    there = (m < QUERIES)[:, None] & wide
    tl.store(outputs + mine[:, None] * HEAD_DIM + d[None, :], values, mask=there)
    # All threads write their parts before one of them counts the program as arrived.
    tl.debug_barrier()
    arrival = arrivals + (row * KV_HEADS + kv_head) * tl.cdiv(QUERIES, M) + tile
    if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") < parts - 1:
        return

    tl.store(arrival, 0)
    peak, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    values = tl.zeros((M, D), tl.float32)
    for part in tl.range(0, parts, num_stages=JOIN_STAGES):
        at = (group_of_parts + part) * QUERIES + m
        # ".cg" bypasses the L1 cache, which does not see writes of other multiprocessors.
        part_lse = tl.load(lse + at, mask=m < QUERIES, other=0.0, cache_modifier=".cg")
        part_at = outputs + at[:, None] * HEAD_DIM + d[None, :]
        part_values = tl.load(part_at, mask=there, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(peak, part_lse)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink, weight = tl.exp2(peak - base), tl.exp2(part_lse - base)
        values = values * shrink[:, None] + part_values * weight[:, None]
        total = total * shrink + weight
        peak = highest
    tl.store(out_at, finished(values, total).to(out.dtype.element_ty), mask=out_there)
