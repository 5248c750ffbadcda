"""What llama.cpp's converter writes of Gemma 4, beside what it writes of every model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from models.families import GLOBAL, LOCAL

__all__ = ["gemma4_metadata", "gemma4_tensors"]

Array = np.ndarray[Any, Any]


def gemma4_metadata(config: Any) -> dict[str, Any]:
    """Values of the file, by keys without the architecture's name."""
    local = [kind == LOCAL for kind in config.layer_types]
    ropes, layers = config.rope_parameters, config.per_layer_config
    first = len(local) - config.num_kv_shared_layers
    size, local_size = (layers[local.index(kind)].head_dim for kind in (False, True))
    values: dict[str, Any] = {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "attention.sliding_window_pattern": local,
        "attention.key_length": size,
        "attention.key_length_swa": local_size,
        "attention.value_length": size,
        "attention.value_length_swa": local_size,
        "rope.dimension_count": size,
        "rope.dimension_count_swa": local_size,
        "rope.freq_base": ropes[GLOBAL]["rope_theta"],
        "rope.freq_base_swa": ropes[LOCAL]["rope_theta"],
    }
    if config.use_double_wide_mlp:
        width = config.intermediate_size
        values["feed_forward_length"] = [
            width if layer < first else 2 * width for layer in range(len(local))
        ]
    heads = [layers[layer].num_key_value_heads for layer in range(len(local))]
    return {**values, "attention.head_count_kv": heads}


def gemma4_tensors(config: Any) -> Iterator[tuple[str, Array]]:
    """The factors by which global layers turn the first pairs of a head, and leave the others."""
    size = config.per_layer_config[config.layer_types.index(GLOBAL)].head_dim
    pairs, share = size // 2, config.rope_parameters[GLOBAL]["partial_rotary_factor"]
    turned = int(size * share / 2)
    yield "rope_freqs.weight", np.float32([1.0] * turned + [1e30] * (pairs - turned))
