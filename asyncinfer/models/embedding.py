"""`Embedding`: token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.quantization import PackedRows

__all__ = ["Embedding"]


class Embedding:
    """A row of `weight` `[vocab, hidden]` per token, times `scale`, plus a row of `positions`
    `[positions, hidden]` where positions are learned. Rows of a packed weight are unpacked as they
    are looked up."""

    def __init__(
        self,
        weight: torch.Tensor | PackedRows,
        scale: float = 1.0,
        positions: torch.Tensor | None = None,
    ) -> None:
        self.weight = weight
        # Rounded to the weights' dtype, as models were trained with it.
        self._scale = torch.tensor(scale, dtype=weight.dtype).item()
        self._positions = positions

    @property
    def table(self) -> torch.Tensor | None:
        """`weight`, where a token's vector is its row as it is."""
        plain = self._scale == 1.0 and self._positions is None
        return self.weight if plain and isinstance(self.weight, torch.Tensor) else None

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[tokens, hidden]` of int64 `[tokens]`, at positions int64 `[tokens]`, which only learned
        positions need."""
        if isinstance(self.weight, torch.Tensor):
            x = F.embedding(token_ids, self.weight)
        else:
            x = self.weight[token_ids].to(self.weight.dtype)
        if self._scale != 1.0:
            x = x.mul_(self._scale)
        if self._positions is not None and positions is not None:
            x = x.add_(F.embedding(positions, self._positions))
        return x
