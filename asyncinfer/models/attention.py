"""`AttentionBuilder` makes the attention of a layer from a config and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asyncinfer.attention import AttentionVariant
from asyncinfer.layers import (
    Attention,
    HeadNorm,
    Indexer,
    LatentAttention,
    LoraLinear,
    NormKind,
    Prepare,
    ProjectionNorm,
    RMSNorm,
    RopeConfig,
    Rotate,
    RotatePart,
    SelfAttention,
    SharedAttention,
    followed,
    make_norm,
    normed_first,
    normed_last,
    scaled,
    unrotated,
)
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.layer_weights import LayerWeights
from asyncinfer.models.parts import IndexerConfig, LatentConfig

__all__ = ["AttentionBuilder"]


class AttentionBuilder:
    """Loads weights in the tensor table's order. `ropes` are the model's different rotations, in
    the order of a forward pass' angles."""

    def __init__(
        self,
        config: ModelConfig,
        ropes: Sequence[RopeConfig],
        weights: LayerWeights,
        device: torch.device,
    ) -> None:
        self._config = config
        self._ropes = ropes
        self._weights = weights
        self._device = device

    def build(self, index: int, name: str, number: int | None = None) -> Attention:
        """The attention of the layer `index`, whose KV has the number `number`, or `index`."""
        scale, latent = self._config.attention_out_scale, self._config.latent
        if latent is None:
            return scaled(self._full(index, name, index if number is None else number), scale)
        return scaled(self._latent(index, latent, name), scale)

    def _full(self, index: int, name: str, number: int) -> Attention:
        config, kv = self._config, self._config.layer_kv(index)
        source = config.layer(index).shares_kv
        qkv = self._linear(f"{name}.qkv", config.qkv_bias)
        out = self._linear(f"{name}.out", config.out_bias)
        prepare, variant = self._prepare(index, name), self.variant(index, name)
        if source is not None:
            return SharedAttention(source, kv.head_dim, qkv, prepare, out, variant)
        return SelfAttention(
            number,
            config.num_heads,
            kv.num_kv_heads,
            kv.head_dim,
            qkv,
            prepare,
            out,
            variant,
            config.attention_gate,
            self._temperature(index),
            make_norm("rms", None, None, config.norm_eps) if config.value_norm else None,
            any(layer.shares_kv == index for layer in config.layers),
        )

    def _latent(self, index: int, latent: LatentConfig, name: str) -> LatentAttention:
        config = self._config

        def norm(part: str) -> RMSNorm:
            # The epsilon of these norms is fixed in the architecture.
            return RMSNorm(self._tensor(f"{name}.{part}"), 1e-6)

        query_down: Callable[[torch.Tensor], torch.Tensor] | None = None
        indexer: Indexer | None = None
        rope = config.layer(index).rope
        place = None if rope is None else self._ropes.index(rope)
        if latent.query_rank is not None:
            down = self._linear(f"{name}.query_down", config.qkv_bias)
            query_down = followed(down, norm("query_norm"))
            if latent.indexer is not None:
                assert place is not None
                indexer = self._indexer(latent.indexer, latent.rotated, place, name)
        query = self._linear(f"{name}.query", False)
        kv_down = self._linear(f"{name}.kv_down", config.qkv_bias)
        kv_norm = norm("kv_norm")
        up = self._tensor(f"{name}.kv_up.weight").view(config.num_heads, -1, latent.kv_rank)
        return LatentAttention(
            index,
            config.num_heads,
            place,
            query_down,
            query,
            kv_down,
            kv_norm,
            up[:, : latent.plain],
            up[:, latent.plain :],
            self._linear(f"{name}.out", config.out_bias),
            self.variant(index, name),
            self._temperature(index),
            indexer,
        )

    def _indexer(self, indexer: IndexerConfig, rotated: int, rope: int, name: str) -> Indexer:
        query, key = (
            self._weights.linear(f"{name}.index_{part}", False, "plain")
            for part in ("query", "key")
        )
        weight, bias = (self._tensor(f"{name}.index_norm.{part}") for part in ("weight", "bias"))
        # The epsilon is fixed in the architecture.
        norm = make_norm("layer", weight, bias, 1e-6)
        weights = self._tensor(f"{name}.index_weights")
        return Indexer(rope, rotated, query, key, norm, weights, indexer.size)

    def rotation(self, index: int) -> Prepare:
        """The rotation of the layer's queries and keys."""
        rope, head_dim = self._config.layer(index).rope, self._config.layer_kv(index).head_dim
        if rope is None:
            return unrotated
        place = self._ropes.index(rope)
        whole = rope.size in (None, head_dim)
        return Rotate(place) if whole else RotatePart(place, rope.size or 0)

    def _prepare(self, index: int, name: str) -> Prepare:
        config, kv = self._config, self._config.layer_kv(index)
        shares, rotate = config.layer(index).shares_kv is not None, self.rotation(index)
        if config.qk_norm is None or not config.layer(index).qk_norm:
            return rotate
        weighted = config.qk_norm_weighted
        plus_one = config.norm == "rms-plus-one" and weighted
        weights = [
            self._tensor(f"{name}.{part}_norm") if weighted else None
            for part in ("q" if shares else "qk")
        ]
        # A layer with queries alone has no norm of keys.
        weights += [None] * (2 - len(weights))
        if config.qk_norm != "projection":
            ones = torch.ones(kv.head_dim, device=self._device, dtype=torch.float32)
            q, k = (ones if weight is None else weight for weight in weights)
            heads = config.num_heads, 0 if shares else kv.num_kv_heads
            norm = HeadNorm(q, k, *heads, config.norm_eps, plus_one)
            return (normed_first if config.qk_norm == "head" else normed_last)(norm, rotate)
        kind: NormKind = "rms-plus-one" if plus_one else "rms"
        q_norm, k_norm = (make_norm(kind, weight, None, config.norm_eps) for weight in weights)
        return normed_first(ProjectionNorm(q_norm, k_norm, config.num_heads), rotate)

    def variant(self, index: int, name: str) -> AttentionVariant | None:
        """How the layer's attention differs from plain causal attention; None: not at all."""
        config = self._config
        layer = config.layer(index)
        # The rows of chunked layers are cut before attention.
        window = None if layer.chunked else layer.window
        sinks = self._tensor(f"{name}.sinks").float() if config.sinks else None
        if window is None and config.attention_softcap is None and sinks is None:
            return None
        return AttentionVariant(window, config.attention_softcap, sinks)

    def _temperature(self, index: int) -> int | None:
        temperature = self._config.layer(index).temperature
        return None if temperature is None else self._config.temperatures.index(temperature)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._weights.tensor(name)

    def _linear(self, name: str, bias: bool) -> LoraLinear:
        return LoraLinear(self._weights.linear(name, bias), name)
