"""The layers of Gemma 4: which are local, which global, and which share keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import MOST_HEAD_DIM, MOST_HEADS, LayerConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.rope_parameters import read_rope
from asyncinfer.models.windows import FULL, MOST_WINDOW, sliding_layers

__all__ = ["gemma4_layers"]

_HEADS = "num_key_value_heads"
_MOST_DIGITS = 20


def gemma4_layers(config: JsonReader, llama: ModelConfig) -> tuple[LayerConfig, ...]:
    """The layers of a config; `llama` has the rotation and the heads of local ones."""
    count = llama.num_layers
    sliding = [*sliding_layers(config, llama, lambda layer: (layer + 1) % 6 != 0)]
    # transformers makes the last layer global, whatever the list says.
    sliding[-1] = False
    _check_own(config, sliding)
    window: int | None = config.integer("sliding_window", 1, MOST_WINDOW)
    if window is not None and window >= llama.max_context:
        window = None
    first = count - config.integer("num_kv_shared_layers", 0, count - 1, 0)
    if set(sliding[:first]) != set(sliding):
        why = "some layer has none of its kind before it to share keys and values with"
        raise config.refuse("num_kv_shared_layers", why)
    wide = config.boolean("use_double_wide_mlp", False)
    same = config.boolean("attention_k_eq_v", False)
    layers = []
    for index, slides in enumerate(sliding):
        shares = None if index < first else _last(sliding[:first], slides)
        width = 2 * llama.intermediate_size if wide and shares is not None else None
        local = LayerConfig(
            rope=llama.rope, window=window, shares_kv=shares, intermediate_size=width
        )
        layers.append(local if slides else _global(config, llama, local, index, same))
    return tuple(layers)


def _check_own(config: JsonReader, sliding: Sequence[bool]) -> None:
    """Refuse settings of single layers, except for the heads of global ones."""
    own = _own(config)
    if own is None:
        return
    keys = {_key(own, index) for index, slides in enumerate(sliding) if not slides}
    for key in own.values:
        layer = own.object(key)
        if key not in keys or (layer and not set(layer.values) <= {"head_dim", _HEADS}):
            raise own.refuse(key, f"must be of a global layer, with head_dim and {_HEADS} alone")


def _own(config: JsonReader) -> JsonReader | None:
    """The config's settings of single layers; None where the key is absent."""
    key = "per_layer_config"
    if not config.has(key):
        return None
    return config.object(key) or JsonReader({}, config.file)


def _key(own: JsonReader, index: int) -> str:
    """The key of a layer's own settings, which may have leading zeros."""
    # Python makes no integer of thousands of digits.
    numbers = (key for key in own.values if key.isdecimal() and len(key) <= _MOST_DIGITS)
    return next((key for key in numbers if int(key) == index), str(index))


def _last(kinds: Sequence[bool], kind: bool) -> int:
    return len(kinds) - 1 - kinds[::-1].index(kind)


def _global(
    config: JsonReader, llama: ModelConfig, local: LayerConfig, index: int, same: bool
) -> LayerConfig:
    """`local` as a global layer; `same`: values are keys."""
    # transformers writes settings of each global layer; checkpoints have one for all of them.
    own = _own(config)
    holder, head_dim, heads = config, "global_head_dim", "num_global_key_value_heads"
    if own is not None:
        holder = own.object(_key(own, index)) or own
        head_dim, heads = "head_dim", _HEADS
    size = holder.integer(head_dim, 2, MOST_HEAD_DIM, llama.head_dim)
    if size % 2:
        raise holder.refuse(head_dim, "must be even")
    count = llama.num_kv_heads
    if (same or own is not None) and holder.has(heads):
        count = holder.integer(heads, 1, MOST_HEADS)
        if llama.num_heads % count:
            raise holder.refuse(heads, f"must divide num_attention_heads={llama.num_heads}")
    return replace(
        local,
        window=None,
        rope=read_rope(config, llama.max_context, size, FULL),
        head_dim=size,
        num_kv_heads=count,
        keys_as_values=same and local.shares_kv is None,
    )
