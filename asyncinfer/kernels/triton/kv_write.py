"""Writes the keys and values of a step's tokens to their pages, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.launched import launched

__all__ = ["head_tile", "kv_write", "storage_limit", "store_heads"]


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """As the reference kernel. `k` and `v` may have any strides."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    tokens, kv_heads, head_dim = k.shape
    if not k.numel():
        return
    heads_block, dim_block, warps = head_tile(kv_heads, head_dim)
    _kv_write[(tokens, triton.cdiv(kv_heads, heads_block), 2)](
        k,
        v,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        slot_mapping,
        STRIDE_TOKEN=k.stride(0),
        STRIDE_HEAD=k.stride(1),
        STRIDE_BLOCK=k_cache.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[2],
        HEADS_BLOCK=heads_block,
        DIM_BLOCK=dim_block,
        LIMIT=storage_limit(k_cache.dtype),
        num_warps=warps,
    )


def head_tile(kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Heads of one program's tile, its head dimension rounded up to a power of two, and its warps.
    A tile has about 1,024 elements."""
    dim_block: int = triton.next_power_of_2(head_dim)
    heads_block: int = min(triton.next_power_of_2(kv_heads), max(1024 // dim_block, 1))
    return heads_block, dim_block, max(heads_block * dim_block // 256, 1)


def storage_limit(dtype: torch.dtype) -> float:
    """The largest value that a quantised cache of this dtype stores, 0 for one that is not."""
    return {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}.get(dtype, 0.0)


@launched(do_not_specialize_on_alignment=("slot_mapping",))
def _kv_write(
    k, v, k_cache, v_cache, k_scales, v_scales, slot_mapping,
    STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr, STRIDE_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    columns = tl.arange(0, DIM_BLOCK)
    inside = (heads < KV_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    source = token * STRIDE_TOKEN + heads[:, None] * STRIDE_HEAD + columns[None, :]
    if tl.program_id(2) == 0:
        values = tl.load(k + source, mask=inside, other=0.0).to(tl.float32)
        store_heads(
            values, k_cache, k_scales, slot, heads,
            STRIDE_BLOCK, KV_HEADS, HEAD_DIM, BLOCK_SIZE, DIM_BLOCK, LIMIT,
        )  # fmt: skip
    else:
        values = tl.load(v + source, mask=inside, other=0.0).to(tl.float32)
        store_heads(
            values, v_cache, v_scales, slot, heads,
            STRIDE_BLOCK, KV_HEADS, HEAD_DIM, BLOCK_SIZE, DIM_BLOCK, LIMIT,
        )  # fmt: skip


@triton.jit
def store_heads(
    values, cache, scales, slot, heads,
    STRIDE_BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM_BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store float32 `values` `[heads, DIM_BLOCK]` of one token, zero beyond `HEAD_DIM`, at int64
    `slot` of `cache`. A slot of -1 stores nothing.

    `cache` is `[num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM]`, with `STRIDE_BLOCK` elements from one
    block to the next. With a `LIMIT` above 0 each head is divided by a scale that makes its largest
    absolute value `LIMIT`, and the scale goes to `scales`.
    """
    # Offsets are int64, since a large cache has more elements than int32 counts.
    block = slot // BLOCK_SIZE
    row = heads * BLOCK_SIZE + slot % BLOCK_SIZE
    there = (slot >= 0) & (heads < KV_HEADS)
    if LIMIT > 0:
        largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-30)
        scale = tl.div_rn(largest, LIMIT + tl.zeros_like(largest))
        tl.store(scales + block * (KV_HEADS * BLOCK_SIZE) + row, scale, mask=there)
        values = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    if LIMIT == 127.0:
        # A float32 number near 1.5 * 2^23 has no bits for a fraction, so the sum is rounded to the
        # nearest whole number, and ties to the even one.
        values = (values + 12582912.0) - 12582912.0
    columns = tl.arange(0, DIM_BLOCK)
    target = cache + block * STRIDE_BLOCK + row[:, None] * HEAD_DIM + columns[None, :]
    inside = there[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(target, values.to(cache.dtype.element_ty), mask=inside)
