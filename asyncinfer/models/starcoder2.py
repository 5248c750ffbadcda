"""StarCoder2 (Lozhkov et al., 2024): Llama with layer norms, biases and a plain feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import windowed

__all__ = ["StarCoder2"]


class StarCoder2(Family):
    """StarCoder2: layer norms, biases, an ungated feed-forward layer, a sliding window."""

    model_type = "starcoder2"
    keys: ClassVar = {
        "rms_norm_eps": "norm_epsilon",
        "attention_bias": "use_bias",
        "mlp_bias": "use_bias",
    }
    defaults: ClassVar = {
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(
            llama,
            norm="layer",
            gated_mlp=False,
            layers=windowed(config, llama),
            names=TensorNames(up=("mlp.c_fc",), down="mlp.c_proj"),
        )
