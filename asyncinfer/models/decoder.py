"""`Decoder`: the transformer that all models share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncinfer.attention import Attend, DeviceBatch, KVCache, begin_attention
from asyncinfer.layers import Embedding, RMSNorm, RotaryEmbedding
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.layer import LayerBuilder, build_norm
from asyncinfer.models.tensors import arranged
from asyncinfer.quantization import CudaLinear, has_fused_kernels, make_linear
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
        """
        Args:
            weights: gives each tensor of `tensor_table(config)` by name, in the table's order.
            max_context: length of the longest sequence; None: `config.max_context`.
            storage: format of the layers' matrices; the head keeps the model's dtype.
        """
        self.config = config
        weights = arranged(config, weights)
        embedding = weights("embedding")
        learned = None if config.learned_positions is None else weights("positions")
        self._embed = Embedding(embedding, config.embedding_scale, learned)
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        layers = [config.layer(index) for index in range(config.num_layers)]
        ropes = list(dict.fromkeys(layer.rope for layer in layers if layer.rope is not None))
        self._rotations = ropes
        self.keep_within(max_context or config.max_context)
        self._scale = config.query_scale
        fused = has_fused_kernels(embedding)
        builder = LayerBuilder(config, ropes, weights, self.device, self.dtype, fused, storage)
        self._layers = [builder.layer(index) for index in range(config.num_layers)]
        self._norm = build_norm(config, "norm", weights)
        head = embedding if config.tied_head else weights("head.weight")
        self._head = make_linear(head, weights("head.bias") if config.head_bias else None)

    @torch.inference_mode()
    def keep_within(self, max_context: int) -> None:
        """Set the length of the longest sequence."""
        self.max_context = max_context
        self._ropes = [
            RotaryEmbedding(rope, self.config.head_dim, self.device, max_context)
            for rope in self._rotations
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks about how the model was loaded."""
        return (*self.config.notes, *(rope.note for rope in self._ropes if rope.note is not None))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[KVCache],
        batches: Sequence[DeviceBatch],
    ) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` in the model's dtype, before the final norm.

        `token_ids` and `positions` are int64 `[tokens]`, row after row as in each of `batches`: one
        for each KV group in `kv`, with the same rows. Writes the KV of every token at the group's
        `slot_mapping` before it is attended to.
        """
        x = self._embed(token_ids, positions)
        angles = [rope(positions) for rope in self._ropes]
        for layer, attend in zip(self._layers, self._attends(kv, batches), strict=True):
            x = layer(x, angles, attend)
        return x

    def _attends(self, kv: Sequence[KVCache], batches: Sequence[DeviceBatch]) -> list[Attend]:
        """Each layer's attention."""
        attends: dict[int, Attend] = {}
        for group, batch in zip(kv, batches, strict=True):
            if group.layers:
                attends.update(
                    dict.fromkeys(group.layers, begin_attention(group, batch, self._scale))
                )
        return [attends[layer] for layer in range(len(self._layers))]

    def logits(self, hidden: torch.Tensor, *, as_stored: bool = False) -> torch.Tensor:
        """float32 `[n, vocab_size]` for the hidden states `[n, hidden]` of rows to sample. With
        `as_stored` they stay in the model's dtype if nothing follows the head's product: the same
        numbers without the conversion."""
        if isinstance(self._head, CudaLinear) and isinstance(self._norm, RMSNorm):
            norm = self._norm
            logits = self._head.fused(
                hidden, norm=norm.weight, eps=norm.eps, plus_one=norm.plus_one
            )
        else:
            logits = self._head(self._norm(hidden))
        cap, scale = self.config.logit_softcap, self.config.logit_scale
        if as_stored and cap is None and scale == 1.0:
            return logits
        logits = logits.float()
        if scale != 1.0:
            logits = logits.mul_(scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
