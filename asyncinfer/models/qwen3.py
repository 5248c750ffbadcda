"""Qwen3 (Yang et al., 2025): Llama with a norm of each query and key head."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.qwen2 import Qwen2
from asyncinfer.models.reader import JsonReader

__all__ = ["Qwen3"]


class Qwen3(Qwen2):
    """Qwen3, dense."""

    model_type = "qwen3"
    defaults: ClassVar = {"head_dim": 128}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(llama, qk_norm="head", layers=super().configure(config, llama).layers)
