"""AFM (Arcee, 2025): Llama with a plain feed-forward layer and squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["Arcee"]


class Arcee(Family):
    """Arcee, such as AFM-4.5B: an ungated feed-forward layer with squared ReLU."""

    model_type = "arcee"
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "hidden_act": "relu2"}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(llama, gated_mlp=False, names=TensorNames(up=("mlp.up_proj",)))
