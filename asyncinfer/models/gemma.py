"""Gemma (Gemma team, 2024): Llama with scaled embeddings, norms plus one, GELU."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader

__all__ = ["Gemma"]


class Gemma(Family):
    """Gemma 1, such as gemma-2b-it and CodeGemma."""

    model_type = "gemma"
    defaults: ClassVar = {
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(
            llama, norm="rms-plus-one", mlp_bias=False, embedding_scale=llama.hidden_size**0.5
        )
