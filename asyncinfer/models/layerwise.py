"""`Layerwise`: the properties of single layers that follow from a decoder's config."""

from __future__ import annotations

import functools
from collections.abc import Collection

from asyncinfer.attention import LayerKV, StateShape
from asyncinfer.layers import AttentionTemperature, RopeConfig
from asyncinfer.models.parts import Block, ExpertsConfig, LatentConfig, LayerConfig

__all__ = ["Layerwise"]


class Layerwise:
    """The properties of a `ModelConfig`'s layers, computed from its fields."""

    __slots__ = ()

    block: Block
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    rope: RopeConfig | None
    layers: tuple[LayerConfig, ...]
    experts: ExpertsConfig | None
    latent: LatentConfig | None
    bidirectional: bool
    head_kv: LayerKV | None

    def layer(self, index: int) -> LayerConfig:
        """The configuration of one layer."""
        return self.layers[index] if self.layers else _plain_layer(self.rope)

    def layer_block(self, index: int) -> Block:
        """Where the norms of one layer are."""
        return self.layer(index).block or self.block

    def layer_experts(self, index: int) -> ExpertsConfig | None:
        """The experts of one layer; None where it has a plain feed-forward part."""
        layer = self.layer(index)
        return self.experts if layer.experts and layer.feed_forward else None

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that keep KV."""
        if self.bidirectional:
            return ()
        layers = [self.layer(index) for index in range(self.num_layers)]
        own = tuple(i for i, it in enumerate(layers) if it.attends and it.shares_kv is None)
        return own if self.head_kv is None else (*own, self.num_layers)

    def layer_kv(self, index: int) -> LayerKV:
        """The keys and values of one layer; `num_layers` stands for a drafting head."""
        if self.head_kv is not None and index == self.num_layers:
            return self.head_kv
        layer = self.layer(index)
        heads = layer.num_kv_heads or self.num_kv_heads
        return LayerKV(heads, layer.head_dim or self.head_dim, self.kv_parts)

    def kv_shapes(self, layers: Collection[int]) -> dict[LayerKV, tuple[int, ...]]:
        """The shapes of those of `layers` that keep KV, by what they keep of a token. Excludes a
        drafting head, whose scores have a scale of their own."""
        found: dict[LayerKV, tuple[int, ...]] = {}
        for index in self.kv_layers:
            if index in layers and index < self.num_layers:
                shape = self.layer_kv(index)
                found[shape] = (*found.get(shape, ()), index)
        return found

    @property
    def uniform_kv(self) -> bool:
        """Whether all layers have keys and values of their own, in one shape."""
        plain = LayerKV(self.num_kv_heads, self.head_dim, self.kv_parts)
        return all(
            self.layer_kv(index) == plain
            and self.layer(index).shares_kv is None
            and not self.layer(index).keys_as_values
            for index in range(self.num_layers)
        )

    def layer_intermediate(self, index: int) -> int:
        """The width of one layer's feed-forward layer."""
        return self.layer(index).intermediate_size or self.intermediate_size

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The layers that see only a window."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.window is not None)

    @property
    def chunked_layers(self) -> tuple[int, ...]:
        """The layers whose tokens see those of their own chunk."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.chunked)

    @property
    def chunk(self) -> int | None:
        """Tokens of a chunk; None without chunks."""
        layers = self.chunked_layers
        return self.layers[layers[0]].window if layers else None

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep a state."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer is not None)

    @property
    def state(self) -> tuple[StateShape, ...]:
        """What each of `state_layers` keeps of a sequence."""
        mixers = [layer.mixer for layer in self.layers if layer.mixer is not None]
        return mixers[0].state(self.hidden_size) if mixers else ()

    @property
    def temperatures(self) -> tuple[AttentionTemperature, ...]:
        """The different attention temperatures of the layers."""
        return tuple(dict.fromkeys(each.temperature for each in self.layers if each.temperature))

    @property
    def window(self) -> int | None:
        """The widest window of a layer that keeps KV; None without windows."""
        layers = (self.layer(i) for i in self.kv_layers if i < self.num_layers)
        windows = (layer.window for layer in layers)
        return max((window for window in windows if window is not None), default=None)

    @property
    def indexed(self) -> int | None:
        """How many tokens a token attends to by an indexer's choice; None without an indexer."""
        indexer = None if self.latent is None else self.latent.indexer
        return None if indexer is None else indexer.most

    @property
    def kv_parts(self) -> int:
        """Parts of the KV cache; see `KVShape`."""
        return 2 if self.latent is None else 1


@functools.cache
def _plain_layer(rope: RopeConfig | None) -> LayerConfig:
    """Cached, since loading a model asks for it a thousand times."""
    return LayerConfig(rope=rope)
