"""Attention of texts whose tokens attend to later tokens, too.

Such a text is computed in one pass, whose own keys and values are all that it needs: pages are
neither written nor read.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from asyncinfer.attention.batch import AttentionBatch
from asyncinfer.attention.variant import AttentionVariant

__all__ = ["WholeAttention"]


class WholeAttention:
    """Attention of one forward pass over rows that are whole texts."""

    def __init__(self, batch: AttentionBatch, scale: float) -> None:
        """`scale` multiplies the scores. Raises `ValueError` for a row that continues a text."""
        if any(batch.starts):
            raise ValueError(f"starts={batch.starts}: every row must begin its text")
        self._scale = scale
        self._spans = list(pairwise(accumulate(batch.counts, initial=0)))
        #: By tokens of a row and window: which keys each query sees, bool `[tokens, tokens]`.
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: AttentionVariant | None = None,
    ) -> torch.Tensor:
        """Attend with `q` `[tokens, heads, head_dim]` to `k` and `v` `[tokens, kv_heads, head_dim]`
        of the same text: to all of them, or to those less than the variant's window away. Returns
        `[tokens, heads * head_dim]`."""
        window = None if variant is None else variant.window
        out = torch.empty_like(q)
        for first, end in self._spans:
            queries, keys, values = (x[first:end].transpose(0, 1)[None] for x in (q, k, v))
            attended = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=self._mask(end - first, window, q.device),
                scale=self._scale,
                enable_gqa=True,
            )
            out[first:end] = attended[0].transpose(0, 1)
        return out.flatten(1)

    def _mask(self, tokens: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Which keys each query of a row sees; None: all."""
        if window is None or window >= tokens:
            return None
        mask = self._masks.get((tokens, window))
        if mask is None:
            at = torch.arange(tokens, device=device)
            mask = self._masks[tokens, window] = (at[:, None] - at).abs() < window
        return mask
