"""The work between the packed projection and attention in one launch: qk-norm, rotary position
embedding, and the write of keys and values to their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.kv_write import head_tile, storage_limit, store_heads
from asyncinfer.kernels.triton.launched import launched
from asyncinfer.kernels.triton.rope import rotated_heads

__all__ = ["rope_kv_write"]


def rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference kernel, rounded once at the end. A program computes a few heads of one
    token."""
    qkv = qkv if qkv.stride(2) == 1 else qkv.contiguous()
    tokens, packed, head_dim = qkv.shape
    kv_heads = k_cache.shape[1]
    heads = packed - 2 * kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    heads_block, dim_block, warps = head_tile(kv_heads, head_dim)
    programs = triton.cdiv(heads, heads_block) + 2 * triton.cdiv(kv_heads, heads_block)
    _rope_kv_write[(tokens, programs)](
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        q,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        slot_mapping,
        q_norm,
        k_norm,
        eps,
        STRIDE_TOKEN=qkv.stride(0),
        STRIDE_HEAD=qkv.stride(1),
        STRIDE_BLOCK=k_cache.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=cos.shape[-1],
        BLOCK_SIZE=k_cache.shape[2],
        HEADS_BLOCK=heads_block,
        DIM_BLOCK=dim_block,
        PLUS_ONE=plus_one,
        LIMIT=storage_limit(k_cache.dtype),
        num_warps=warps,
    )
    return q


@launched(do_not_specialize_on_alignment=("slot_mapping",))
def _rope_kv_write(
    qkv,
    cos,
    sin,
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slot_mapping,
    q_norm,
    k_norm,
    eps,
    STRIDE_TOKEN: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    Q_PROGRAMS: tl.constexpr = (HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    KV_PROGRAMS: tl.constexpr = (KV_HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    in_block = tl.arange(0, HEADS_BLOCK)
    columns = tl.arange(0, DIM_BLOCK)
    qkv += token * STRIDE_TOKEN
    cos += token * ROTARY_DIM
    sin += token * ROTARY_DIM
    if program < Q_PROGRAMS:
        heads = program * HEADS_BLOCK + in_block
        turned = rotated_heads(
            qkv, cos, sin, q_norm, eps, heads, heads < HEADS,
            STRIDE_HEAD, HEAD_DIM, ROTARY_DIM, DIM_BLOCK, PLUS_ONE,
        )  # fmt: skip
        inside = (heads < HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
        target = q + token * (HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + columns[None, :]
        tl.store(target, turned.to(q.dtype.element_ty), mask=inside)
    elif program < Q_PROGRAMS + KV_PROGRAMS:
        heads = (program - Q_PROGRAMS) * HEADS_BLOCK + in_block
        turned = rotated_heads(
            qkv + HEADS * STRIDE_HEAD, cos, sin, k_norm, eps, heads, heads < KV_HEADS,
            STRIDE_HEAD, HEAD_DIM, ROTARY_DIM, DIM_BLOCK, PLUS_ONE,
        )  # fmt: skip
        store_heads(
            turned, k_cache, k_scales, tl.load(slot_mapping + token), heads,
            STRIDE_BLOCK, KV_HEADS, HEAD_DIM, BLOCK_SIZE, DIM_BLOCK, LIMIT,
        )  # fmt: skip
    else:
        heads = (program - Q_PROGRAMS - KV_PROGRAMS) * HEADS_BLOCK + in_block
        inside = (heads < KV_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
        source = qkv + (HEADS + KV_HEADS + heads[:, None]) * STRIDE_HEAD + columns[None, :]
        values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        store_heads(
            values, v_cache, v_scales, tl.load(slot_mapping + token), heads,
            STRIDE_BLOCK, KV_HEADS, HEAD_DIM, BLOCK_SIZE, DIM_BLOCK, LIMIT,
        )  # fmt: skip
