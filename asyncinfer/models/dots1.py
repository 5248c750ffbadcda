"""dots.llm1 (rednote-hilab, 2025): Qwen3's attention, and experts as DeepSeek-V3 has them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import dense_first, read_grouped_experts, with_experts
from asyncinfer.models.family import Family
from asyncinfer.models.parts import MOST_LAYERS
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import sliding_layers, windowed

__all__ = ["Dots1"]


class Dots1(Family):
    """dots.llm1, such as dots.llm1.inst: norms of heads, experts by sigmoid, two shared."""

    model_type = "dots1"
    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        first = config.integer("max_window_layers", 0, MOST_LAYERS)
        slides = sliding_layers(config, llama, lambda layer: layer >= first)
        base = replace(llama, qk_norm="head", experts=read_grouped_experts(config, llama))
        if any(slides):
            base = replace(base, layers=windowed(config, llama, slides))
        return with_experts(base, dense_first(config, llama.num_layers, llama.rope))
