"""Nemotron (NVIDIA, 2024): layer norms by one plus their weight, squared ReLU without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["Nemotron"]


class Nemotron(Family):
    """Nemotron and Minitron: layer norms, squared ReLU, half of each head rotated."""

    model_type = "nemotron"
    keys: ClassVar = {"rms_norm_eps": "norm_eps"}
    defaults: ClassVar = {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5}
    partial_rotary = True

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        names = TensorNames(up=("mlp.up_proj",))
        return replace(llama, norm="layer-plus-one", gated_mlp=False, names=names)
