"""The decoder that every model shares."""

from __future__ import annotations

import torch

from asyncinfer.attention import AttentionBatch, KVCache
from asyncinfer.models.config import ModelConfig

__all__ = ["Decoder"]


class Decoder:
    """A decoder-only transformer over a paged KV cache. Call it under `torch.inference_mode()`."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KVCache,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` in the model's dtype, final norm applied.

        `token_ids` and `positions` are int64 `[tokens]`, row after row as in `batch`. Writes the
        KV of every token at `batch.slot_mapping` before it is attended to.
        """
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[n, vocab_size]` of the hidden states `[n, hidden]` to be sampled."""
        raise NotImplementedError
