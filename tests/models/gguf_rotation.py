"""The rotation as llama.cpp's converter writes it: keys and tensors of factors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["rotation_metadata", "rotation_tensors"]

Array = np.ndarray[Any, Any]


def rotation_metadata(
    config: Any, name: str, parts: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
    """Values for `parts`, the rotation of layers that see all; `name` is GGUF's architecture."""
    values: dict[str, Any] = {}
    kind = parts.get("rope_type")
    if kind == "dynamic":
        # Hunyuan's converter stretches the base.
        stretched = parts["alpha"] ** (head_dim / (head_dim - 2))
        values["rope.freq_base"] = parts["rope_theta"] * stretched
    if kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": parts["factor"]}
    if kind == "yarn":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": parts["factor"]}
        original = parts["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
        if name == "mistral3":
            values["attention.temperature_scale"] = parts["llama_4_scaling_beta"]
            values["rope.scaling.yarn_log_multiplier"] = parts["mscale_all_dim"]
        # The file has no word for it; llama.cpp's gpt-oss does not round either.
        assert parts.get("truncate", True) is (name != "gpt-oss")
    if kind == "longrope":
        values["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    return values


def rotation_tensors(config: Any) -> Iterator[tuple[str, Array]]:
    """The factors of a rotation that are tensors of a file."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.float32(rope[f"{length}_factor"])
    if rope.get("rope_type") == "llama3":
        size = config.hidden_size // config.num_attention_heads
        plain = rope["rope_theta"] ** -(np.arange(0, size, 2) / size)
        waves = 2 * np.pi / plain
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        smooth = (rope["original_max_position_embeddings"] / waves - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        found = np.where(waves < high, 1.0, np.where(waves > low, rope["factor"], between))
        yield "rope_freqs.weight", found.astype(np.float32)
