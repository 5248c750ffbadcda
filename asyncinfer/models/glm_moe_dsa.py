"""GLM-5 (Z.ai, 2026): DeepSeek-V3.2's sparse attention, whose indexer rotates adjacent pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.deepseek_v32 import DeepSeekV32
from asyncinfer.models.parts import IndexerConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["GLM5"]

_SHARED = "a layer that takes the choice of the one before is not supported"


class GLM5(DeepSeekV32):
    """GLM-5: sparse attention by an indexer in each layer, exactly computed."""

    model_type = "glm_moe_dsa"
    defaults: ClassVar = {
        **DeepSeekV32.defaults,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if config.has("indexer_types"):
            kinds = config.strings("indexer_types", llama.num_layers, ("full", "shared"))
            if "shared" in kinds:
                raise config.refuse("indexer_types", _SHARED)
        elif config.integer("index_topk_freq", 1, 1 << 10, 1) > 1:
            raise config.refuse("index_topk_freq", _SHARED)
        elif "S" in config.string("index_topk_pattern", "F"):
            raise config.refuse("index_topk_pattern", _SHARED)
        return super().configure(config, llama)

    def indexer(self, config: JsonReader) -> IndexerConfig:
        return replace(super().indexer(config), interleaved=True)
