"""ERNIE 4.5 (Baidu, 2025), dense: Llama with an interleaved rotation and one switch for biases."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader

__all__ = ["Ernie45"]


class Ernie45(Family):
    """ERNIE 4.5, dense, such as ERNIE-4.5-0.3B-PT: an interleaved rotation."""

    model_type = "ernie4_5"
    keys: ClassVar = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
    defaults: ClassVar = {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        assert llama.rope is not None
        return replace(llama, rope=replace(llama.rope, interleaved=True))
