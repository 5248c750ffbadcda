"""DeepSeek-V3.2 (DeepSeek-AI, 2025): DeepSeek-V3, whose tokens attend only to tokens that an
indexer chooses."""

from __future__ import annotations

from typing import ClassVar

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.deepseek_v3 import DeepSeekV3
from asyncinfer.models.experts import sparse_by_list
from asyncinfer.models.parts import MOST_HEADS, MOST_WIDTH, IndexerConfig, LayerConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["DeepSeekV32"]

_MOST_CHOSEN = 2**31 - 1


class DeepSeekV32(DeepSeekV3):
    """DeepSeek-V3.2 and V3.2-Exp: DeepSeek-V3 with sparse attention, exactly computed."""

    model_type = "deepseek_v32"
    defaults: ClassVar = {
        **DeepSeekV3.defaults,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "max_position_embeddings": 163_840,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if not config.has("q_lora_rank"):
            raise config.refuse("q_lora_rank", "is required, as the indexer needs it")
        return super().configure(config, llama)

    def indexer(self, config: JsonReader) -> IndexerConfig:
        rotated = config.integer("qk_rope_head_dim", 2, MOST_WIDTH)
        return IndexerConfig(
            heads=config.integer("index_n_heads", 1, MOST_HEADS),
            size=config.integer("index_head_dim", rotated, MOST_WIDTH),
            most=config.integer("index_topk", 1, _MOST_CHOSEN),
        )

    def layers(
        self, config: JsonReader, count: int, rope: RopeConfig | None
    ) -> tuple[LayerConfig, ...]:
        return sparse_by_list(config, count, rope)
