"""Which layers attend to a sliding window only, as `config.json` says it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import LayerConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["FULL", "SLIDING", "sliding_layers", "windowed", "windowed_if_used"]

FULL = "full_attention"
SLIDING = "sliding_attention"
_MOST_WINDOW = 1 << 30


def sliding_layers(
    config: JsonReader, llama: ModelConfig, default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """For each layer whether `layer_types` calls it sliding; where there is no such list, whether
    `default` of its index does."""
    if not config.has("layer_types"):
        return tuple(map(default, range(llama.num_layers)))
    types = config.strings("layer_types", llama.num_layers, (FULL, SLIDING))
    return tuple(kind == SLIDING for kind in types)


def windowed(
    config: JsonReader,
    llama: ModelConfig,
    sliding: Sequence[bool] | None = None,
    local_rope: RopeConfig | None = None,
) -> tuple[LayerConfig, ...]:
    """The layers, with a window of `sliding_window` tokens for those that are `sliding` (None: all
    are). `local_rope` is the rotation of these, if it is another."""
    window: int | None = None
    if config.has("sliding_window"):
        window = config.integer("sliding_window", 1, _MOST_WINDOW)
    if window is not None and window >= llama.max_context:
        window = None
    if window is None and local_rope is None:
        return ()
    return tuple(
        LayerConfig(rope=local_rope or llama.rope, window=window)
        if slides
        else LayerConfig(rope=llama.rope)
        for slides in sliding or [True] * llama.num_layers
    )


def windowed_if_used(
    config: JsonReader, llama: ModelConfig, default: Callable[[int], bool]
) -> tuple[LayerConfig, ...]:
    """The same where `use_sliding_window` has to turn windows on."""
    if not config.boolean("use_sliding_window", False):
        return ()
    return windowed(config, llama, sliding_layers(config, llama, default))
