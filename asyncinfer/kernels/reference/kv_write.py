"""Keys and values of a step's tokens, into their pages."""

from __future__ import annotations

import torch

__all__ = ["kv_write"]


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Put `k` and `v` `[tokens, kv_heads, head_dim]` at `slot_mapping` (`block * block_size +
    offset`, int64 `[tokens]`) of `[num_blocks, kv_heads, block_size, head_dim]`, in place."""
    block_size = k_cache.shape[2]
    block = slot_mapping // block_size
    offset = slot_mapping % block_size
    k_cache[block, :, offset] = k
    v_cache[block, :, offset] = v
