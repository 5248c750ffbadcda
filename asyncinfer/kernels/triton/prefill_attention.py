"""Attention of rows with many query tokens, such as chunks of prompts (FlashAttention-2: Dao,
2023)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.attention_tile import attend_tile, finished, load_queries
from asyncinfer.kernels.triton.attention_tiling import device_shared, prefill_tiling
from asyncinfer.kernels.triton.kv_layout import KVLayout
from asyncinfer.kernels.triton.launched import launched

__all__ = ["prefill_attention"]


def prefill_attention(
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
    first_row: int,
) -> None:
    """Attend for the rows from `first_row` on into `out`. The arguments are those of
    `paged_attention`.

    A program takes `M` queries of one row and one KV head, numbered as in `load_queries`. The
    number of programs depends on shapes alone. Each program finds its row on the device, and
    programs beyond the last row's end at once.
    """
    tokens, heads, head_dim = q.shape
    group = heads // kv.heads
    rows = seq_lens.shape[0] - first_row
    tiling = prefill_tiling(head_dim, q.dtype, kv.k.dtype, device_shared(q.device))
    # A row of n queries needs n / tiling.m programs, rounded up.
    grid = (kv.heads, tokens * group // tiling.m + rows)
    _prefill_attention[grid](
        q, kv.k, kv.v, kv.k_scales, kv.v_scales, sinks, block_tables, seq_lens, query_starts, out,
        block_tables.stride(0), first_row, rows, scale,
        SOFTCAP=softcap, WINDOW=window,
        Q_STRIDE=q.stride(0), Q_HEAD_STRIDE=q.stride(1),
        CACHE_STRIDE=kv.k.stride(0), CACHE_HEAD_STRIDE=kv.k.stride(1),
        CACHE_TOKEN_STRIDE=kv.k.stride(2), KV_HEADS=kv.heads, BLOCK_SIZE=kv.k.shape[2],
        GROUP=group, HEAD_DIM=head_dim, D=tiling.d, M=tiling.m, N=tiling.n,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


@launched(
    do_not_specialize=("table_stride", "first_row", "rows"),
    do_not_specialize_on_alignment=("block_tables", "seq_lens", "query_starts"),
)
def _prefill_attention(
    q, k_cache, v_cache, k_scales, v_scales, sinks, block_tables, seq_lens, query_starts, out,
    table_stride, first_row, rows, scale,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr, CACHE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr,
    CACHE_TOKEN_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    # The last queries see the most keys and take longest, so their programs come first.
    program = tl.num_programs(1) - 1 - tl.program_id(1)
    query_starts += first_row
    row = _row_of(program, query_starts, rows, GROUP, M)
    first_token = tl.load(query_starts + row)
    tokens = tl.load(query_starts + row + 1) - first_token
    tile = program - _first_program(row, first_token - tl.load(query_starts), GROUP, M)
    if tile * M >= tokens * GROUP:
        return

    m = tile * M + tl.arange(0, M)
    length = tl.load(seq_lens + first_row + row)
    queries, values, peak, total = load_queries(
        q + first_token.to(tl.int64) * Q_STRIDE, sinks, m, tokens, kv_head,
        Q_STRIDE, Q_HEAD_STRIDE, GROUP, HEAD_DIM, D,
    )  # fmt: skip
    position = length - tokens + m // GROUP
    table = block_tables + (first_row + row).to(tl.int64) * table_stride
    # The position of the program's first query. Every query sees the keys up to it.
    earliest = length - tokens + tile * M // GROUP
    end = tl.minimum(length - tokens + (tile * M + M - 1) // GROUP + 1, length)
    if WINDOW is None:
        begin = tl.maximum(earliest + 1, 0) // N * N
        for start in range(0, begin, N):
            values, peak, total = attend_tile(
                values, peak, total, queries, position, start, end, table,
                k_cache, v_cache, k_scales, v_scales, kv_head, scale,
                SOFTCAP=SOFTCAP, WINDOW=WINDOW, MASKED=False, CACHE_STRIDE=CACHE_STRIDE,
                CACHE_HEAD_STRIDE=CACHE_HEAD_STRIDE, CACHE_TOKEN_STRIDE=CACHE_TOKEN_STRIDE,
                KV_HEADS=KV_HEADS, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM, D=D, N=N,
            )  # fmt: skip
    else:
        begin = tl.maximum(earliest - WINDOW + 1, 0)
    for start in range(begin, end, N):
        values, peak, total = attend_tile(
            values, peak, total, queries, position, start, end, table,
            k_cache, v_cache, k_scales, v_scales, kv_head, scale,
            SOFTCAP=SOFTCAP, WINDOW=WINDOW, MASKED=True, CACHE_STRIDE=CACHE_STRIDE,
            CACHE_HEAD_STRIDE=CACHE_HEAD_STRIDE, CACHE_TOKEN_STRIDE=CACHE_TOKEN_STRIDE,
            KV_HEADS=KV_HEADS, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM, D=D, N=N,
        )  # fmt: skip

    d = tl.arange(0, D)
    head = kv_head * GROUP + m % GROUP
    out_at = (first_token + m // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head
    there = (m // GROUP < tokens)[:, None] & (d < HEAD_DIM)[None, :]
    values = finished(values, total).to(out.dtype.element_ty)
    tl.store(out + out_at[:, None] * HEAD_DIM + d[None, :], values, mask=there)


@triton.jit
def _first_program(row, tokens_before, GROUP: tl.constexpr, M: tl.constexpr):
    """The number of a row's first program, where `tokens_before` query tokens are in rows before. A
    row has as many programs as it needs, or one more."""
    return tokens_before * GROUP // M + row


@triton.jit
def _row_of(program, query_starts, rows, GROUP: tl.constexpr, M: tl.constexpr):
    """The row of a program: the last one whose first program is not after `program`."""
    first_token = tl.load(query_starts)
    begun = 0
    for start in range(0, rows, 128):
        row = start + tl.arange(0, 128)
        before = tl.load(query_starts + row, mask=row < rows, other=0) - first_token
        started = (row < rows) & (_first_program(row, before, GROUP, M) <= program)
        begun += tl.sum(started.to(tl.int32), axis=0)
    return begun - 1
