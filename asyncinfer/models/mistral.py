"""Mistral (Jiang et al., 2023): Llama with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import windowed

__all__ = ["Mistral"]


class Mistral(Family):
    """Mistral 7B and its successors, with and without a sliding window."""

    model_type = "mistral"
    defaults: ClassVar = {"sliding_window": 4096, "num_key_value_heads": 8}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(llama, layers=windowed(config, llama))
