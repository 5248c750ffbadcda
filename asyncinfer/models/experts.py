"""What `config.json` says about a mixture of experts."""

from __future__ import annotations

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import ExpertsConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["read_experts"]

#: Over all layers; several times what any model has. Each is a few tensors to look for.
_MOST_EXPERTS = 1 << 17


def read_experts(
    config: JsonReader, llama: ModelConfig, count_key: str, intermediate_size: int
) -> ExpertsConfig:
    """`count_key` says how many there are, `num_experts_per_tok` how many a token takes."""
    count = config.integer(count_key, 1, _MOST_EXPERTS // llama.num_layers)
    return ExpertsConfig(
        count=count,
        active=config.integer("num_experts_per_tok", 1, count),
        intermediate_size=intermediate_size,
    )
