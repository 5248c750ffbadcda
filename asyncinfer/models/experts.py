"""Reading the keys of a mixture of experts from `config.json`."""

from __future__ import annotations

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import ExpertsConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["read_experts"]

#: Over all layers: several times as many as any model has, since each means a few tensors.
_MOST_EXPERTS = 1 << 17


def read_experts(
    config: JsonReader, llama: ModelConfig, count_key: str, intermediate_size: int
) -> ExpertsConfig:
    """The experts, whose number is under `count_key`, and of which a token takes
    `num_experts_per_tok`."""
    count = config.integer(count_key, 1, _MOST_EXPERTS // llama.num_layers)
    return ExpertsConfig(
        count=count,
        active=config.integer("num_experts_per_tok", 1, count),
        intermediate_size=intermediate_size,
    )
