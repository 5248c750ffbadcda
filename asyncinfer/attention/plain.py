"""Keys and values as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["PlainKV"]


class PlainKV:
    """A `KVFormat` of one tensor in the model's own dtype."""

    exact = True

    def tensors(self, head_dim: int, dtype: torch.dtype) -> Sequence[tuple[int, torch.dtype]]:
        return ((head_dim, dtype),)

    def encode(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        return (values,)

    def gather(self, pages: Sequence[torch.Tensor], index: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(pages[0], 0, index, out=out)
