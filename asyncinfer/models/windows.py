"""Reading from `config.json` which layers attend to a sliding window only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import LayerConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["FULL", "MOST_WINDOW", "SLIDING", "sliding_layers", "windowed", "windowed_if_used"]

FULL = "full_attention"
SLIDING = "sliding_attention"
MOST_WINDOW = 1 << 30


def sliding_layers(
    config: JsonReader, llama: ModelConfig, default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """For each layer whether `layer_types` calls it sliding; without such a list, `default` of the
    layer's index."""
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
    are). `local_rope` is the rotation of sliding layers, if they have another one."""
    window: int | None = None
    if config.has("sliding_window"):
        # A token that sees those after it sees as many on each side, beside itself.
        window = config.integer("sliding_window", 1, MOST_WINDOW) + llama.bidirectional
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
    """`windowed` if `use_sliding_window` is true; else there are no windows."""
    if not config.boolean("use_sliding_window", False):
        return ()
    return windowed(config, llama, sliding_layers(config, llama, default))
