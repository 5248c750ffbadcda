"""The decoder that every model shares."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.attention import AttentionBatch, KVCache, begin_attention
from asyncinfer.layers import DecoderLayer, GatedMLP, RMSNorm, RotaryEmbedding, SelfAttention
from asyncinfer.models.config import ModelConfig
from asyncinfer.quantization import Linear, make_linear
from asyncinfer.weights import WeightSource

__all__ = ["Decoder"]


class Decoder:
    """A decoder-only transformer over a paged KV cache. Call it under `torch.inference_mode()`."""

    def __init__(self, config: ModelConfig, weights: WeightSource) -> None:
        """`weights` gives each tensor of `tensor_table(config)` by name, in the table's order."""
        self.config = config
        self._embedding = weights("embedding")
        self.device: torch.device = self._embedding.device
        self.dtype: torch.dtype = self._embedding.dtype
        self._rope = RotaryEmbedding(config.rope, config.head_dim, self.device)
        self._scale = config.head_dim**-0.5
        self._layers = [_layer(config, index, weights) for index in range(config.num_layers)]
        self._norm = RMSNorm(weights("norm"), config.rms_norm_eps)
        self._head = make_linear(self._embedding if config.tied_head else weights("head"))

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
        x = F.embedding(token_ids, self._embedding)
        cos, sin = self._rope(positions)
        attend = begin_attention(kv, batch, self._scale)
        for layer in self._layers:
            x = layer(x, cos, sin, attend)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[n, vocab_size]` of the hidden states `[n, hidden]` to be sampled."""
        return self._head(hidden).float()


def _layer(config: ModelConfig, index: int, weights: WeightSource) -> DecoderLayer:
    name = f"layers.{index}"

    def norm(part: str) -> RMSNorm:
        return RMSNorm(weights(f"{name}.{part}"), config.rms_norm_eps)

    def linear(part: str, bias: bool) -> Linear:
        return make_linear(
            weights(f"{name}.{part}.weight"), weights(f"{name}.{part}.bias") if bias else None
        )

    return DecoderLayer(
        norm("attention_norm"),
        SelfAttention(
            index,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            linear("attention.qkv", config.attention_bias),
            linear("attention.out", config.attention_bias),
        ),
        norm("mlp_norm"),
        GatedMLP(
            linear("mlp.gate_up", config.mlp_bias),
            linear("mlp.down", config.mlp_bias),
            config.intermediate_size,
        ),
    )
