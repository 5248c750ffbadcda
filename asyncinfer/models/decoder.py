"""The decoder that every model shares."""

from __future__ import annotations

import torch

from asyncinfer.attention import Attend, DeviceBatch, KVCache, begin_attention
from asyncinfer.layers import Embedding, RotaryEmbedding
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.layer import LayerBuilder, build_norm
from asyncinfer.models.tensors import arranged
from asyncinfer.quantization import has_fused_kernels, make_linear
from asyncinfer.weights import WeightSource

__all__ = ["Decoder"]


class Decoder:
    """A decoder-only transformer over a paged KV cache. Call it under `torch.inference_mode()`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        max_context: int | None = None,
        storage: str = "plain",
    ) -> None:
        """`weights` gives each tensor of `tensor_table(config)` by name, in the table's order.
        No sequence will be longer than `max_context` (None: `config.max_context`).
        `storage` is what the layers' matrices are held as; the head is never smaller."""
        self.config = config
        weights = arranged(config, weights)
        embedding = weights("embedding")
        learned = None if config.learned_positions is None else weights("positions")
        self._embed = Embedding(embedding, config.embedding_scale, learned)
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        layers = [config.layer(index) for index in range(config.num_layers)]
        ropes = list(dict.fromkeys(layer.rope for layer in layers if layer.rope is not None))
        context = max_context or config.max_context
        self._ropes = [
            RotaryEmbedding(rope, config.head_dim, self.device, context) for rope in ropes
        ]
        self._scale = config.attention_scale or config.head_dim**-0.5
        fused = has_fused_kernels(embedding)
        builder = LayerBuilder(config, ropes, weights, self.device, fused, storage)
        self._layers = [builder.layer(index) for index in range(config.num_layers)]
        self._norm = build_norm(config, "norm", weights)
        head = embedding if config.tied_head else weights("head.weight")
        self._head = make_linear(head, weights("head.bias") if config.head_bias else None)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KVCache,
        batch: DeviceBatch,
    ) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` in the model's dtype, final norm applied.

        `token_ids` and `positions` are int64 `[tokens]`, row after row as in `batch`. Writes the
        KV of every token at `batch.slot_mapping`, or `window_mapping`, before it is attended to.
        """
        x = self._embed(token_ids, positions)
        angles = [rope(positions) for rope in self._ropes]
        for layer, attend in zip(self._layers, self._attends(kv, batch), strict=True):
            x = layer(x, angles, attend)
        return self._norm(x)

    def _attends(self, kv: KVCache, batch: DeviceBatch) -> list[Attend]:
        """Each layer's attention."""
        if kv.window is None:
            return [begin_attention(kv, batch, self._scale)] * len(self._layers)
        near = far = begin_attention(kv.window, batch.windowed(), self._scale)
        if kv.num_layers:
            far = begin_attention(kv, batch, self._scale)
        windowed = kv.window.layers
        return [near if layer in windowed else far for layer in range(len(self._layers))]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[n, vocab_size]` of the hidden states `[n, hidden]` to be sampled."""
        logits = self._head(hidden).float()
        if self.config.logit_scale != 1.0:
            logits = logits.mul_(self.config.logit_scale)
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
