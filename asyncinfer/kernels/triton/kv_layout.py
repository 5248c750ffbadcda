"""`KVLayout`: one layer's paged KV cache, checked to be in the layout that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncinfer.kernels.triton.attention_tiling import device_capability

__all__ = ["KVLayout"]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`k` and `v` `[num_blocks, kv_heads, block_size, head_dim]`, and of a quantised cache float32
    scales `[num_blocks, kv_heads, block_size]`.

    Raises `ValueError` for strides that the kernels do not read, and for fp8 on an older GPU.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None

    def __post_init__(self) -> None:
        if self.k.stride() != self.v.stride() or self.k.stride(3) != 1:
            raise ValueError(
                f"paged_attention: k_cache and v_cache have strides {self.k.stride()} and "
                f"{self.v.stride()}: they must be equal, and end in 1"
            )
        capability = device_capability(self.k.device)
        if self.k.dtype is torch.float8_e4m3fn and capability < 89:
            raise ValueError(
                "paged_attention: an fp8 cache needs a GPU of compute capability 8.9, this one has "
                f"{capability / 10}"
            )
        for name, scales in (("k_scales", self.k_scales), ("v_scales", self.v_scales)):
            if scales is not None and not scales.is_contiguous():
                raise ValueError(f"paged_attention: {name} is not contiguous")

    @property
    def heads(self) -> int:
        return self.k.shape[1]
