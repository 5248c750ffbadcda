"""Rotary position embedding (Su et al., 2021), the half-split form of GPT-NeoX and Llama.

The angles come as cosines and sines in float32, which are computed once a step for all layers. A
kernel would have to compute exact sines of large arguments for every head. What it reads instead
stays in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.kv_write import head_tile
from asyncinfer.kernels.triton.launched import launched

__all__ = ["rope", "rotated_heads"]


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As the reference kernel. Heads and tokens of `x` may have any stride."""
    x = x if x.stride(2) == 1 else x.contiguous()
    tokens, heads, head_dim = x.shape
    out = torch.empty((tokens, heads, head_dim), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    heads_block, dim_block, warps = head_tile(heads, head_dim)
    _rope[(tokens, triton.cdiv(heads, heads_block))](
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        STRIDE_TOKEN=x.stride(0),
        STRIDE_HEAD=x.stride(1),
        HEADS=heads,
        HEAD_DIM=head_dim,
        HEADS_BLOCK=heads_block,
        DIM_BLOCK=dim_block,
        num_warps=warps,
    )
    return out


@launched()
def _rope(
    x, cos, sin, out, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEADS_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    turned = rotated_heads(
        x + token * STRIDE_TOKEN, cos + token * HEAD_DIM, sin + token * HEAD_DIM, None, 0.0,
        heads, heads < HEADS, STRIDE_HEAD, HEAD_DIM, HEAD_DIM, DIM_BLOCK, False,
    )  # fmt: skip
    columns = tl.arange(0, DIM_BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    target = out + token * (HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + columns[None, :]
    tl.store(target, turned.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotated_heads(
    x, cos, sin, norm, eps, heads, there,
    STRIDE_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """float32 `[heads, DIM_BLOCK]`: the heads of one token, zero unless `there`.

    Heads are read from `x`, normalised if there is a `norm`, and rotated in their first
    `ROTARY_DIM` elements. Each thread also reads the partner of its element in the pair. Reading
    that from the L1 cache takes less time than an exchange between threads.
    """
    columns = tl.arange(0, DIM_BLOCK)
    partners = (columns + ROTARY_DIM // 2) % ROTARY_DIM
    inside = there[:, None] & (columns < HEAD_DIM)[None, :]
    rotary = columns < ROTARY_DIM
    x += heads[:, None] * STRIDE_HEAD
    values = tl.load(x + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    others = tl.load(x + partners[None, :], mask=there[:, None] & rotary[None, :], other=0.0)
    others = others.to(tl.float32)
    if norm is not None:
        factors = tl.load(norm + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
        other_factors = tl.load(norm + partners, mask=rotary, other=0.0).to(tl.float32)
        if PLUS_ONE:
            factors += 1.0
            other_factors += 1.0
        inverse = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + eps)[:, None]
        values = values * inverse * factors[None, :]
        others = others * inverse * other_factors[None, :]
    cosines = tl.load(cos + columns, mask=rotary, other=1.0)
    sines = tl.load(sin + columns, mask=rotary, other=0.0)
    return values * cosines[None, :] + others * sines[None, :]
