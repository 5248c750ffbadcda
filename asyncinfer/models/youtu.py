"""Youtu-LLM (Tencent, 2025): DeepSeek-V3's latent attention in a small model without experts."""

from __future__ import annotations

from typing import ClassVar

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.deepseek_v3 import DeepSeekV3
from asyncinfer.models.parts import ExpertsConfig, LayerConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["Youtu"]


class Youtu(DeepSeekV3):
    """Youtu-LLM, such as Youtu-LLM-2B: latent attention, no experts."""

    model_type = "youtu"
    defaults: ClassVar = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "tie_word_embeddings": True,
        "num_nextn_predict_layers": 0,
    }

    def layers(
        self, config: JsonReader, count: int, rope: RopeConfig | None
    ) -> tuple[LayerConfig, ...]:
        return ()

    def experts(self, config: JsonReader, llama: ModelConfig) -> ExpertsConfig | None:
        return None
