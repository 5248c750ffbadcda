"""transformers with a cache that keeps what a KV format keeps."""

from __future__ import annotations

from typing import Any

import torch
from attention.rounding import rounded
from transformers import DynamicCache, PreTrainedModel

__all__ = ["NEAR", "rounded_logits"]

#: A number that lies between two that can be stored may go either way for the last bit of a sum.
NEAR = 2e-3


class RoundedCache(DynamicCache):
    """What attention gets to see is what a format keeps of it."""

    def __init__(self, kv: str) -> None:
        super().__init__()
        self.kv = kv

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = (rounded(tensor, self.kv).to(tensor.dtype) for tensor in (keys, values))
        return super().update(keys, values, *args, **kwargs)


def rounded_logits(model: PreTrainedModel, ids: torch.Tensor, kv: str) -> torch.Tensor:
    """Logits of every position, float32 `[tokens, vocab]`."""
    with torch.inference_mode():
        return model(ids[None], past_key_values=RoundedCache(kv), use_cache=True).logits[0]
