"""SmolLM3 (Hugging Face, 2025): Llama with every fourth layer left unrotated (Yang et al., 2025,
"Rope to Nope and Back Again")."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import windowed_if_used

__all__ = ["SmolLM3"]


class SmolLM3(Family):
    """SmolLM3: some layers without rotary embedding."""

    model_type = "smollm3"
    defaults: ClassVar = {
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        n = llama.num_layers
        if config.has("no_rope_layers"):
            # 1 stands for a layer with rope.
            rotated = [bool(flag) for flag in config.integers("no_rope_layers", n, 0, 1)]
        else:
            interval = config.integer("no_rope_layer_interval", 1, 1 << 10, 4)
            rotated = [(layer + 1) % interval != 0 for layer in range(n)]
        llama = replace(
            llama, layers=windowed_if_used(config, llama, lambda layer: not rotated[layer])
        )
        return replace(
            llama,
            layers=tuple(
                llama.layer(layer) if rotated[layer] else replace(llama.layer(layer), rope=None)
                for layer in range(n)
            ),
        )
