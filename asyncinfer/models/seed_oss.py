"""Seed-OSS (ByteDance, 2025): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader

__all__ = ["SeedOss"]


class SeedOss(Family):
    """Seed-OSS, such as Seed-OSS-36B-Instruct: biases on queries, keys and values."""

    model_type = "seed_oss"
    defaults: ClassVar = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(llama, out_bias=config.boolean("attention_out_bias", False))
