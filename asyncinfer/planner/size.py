"""`ModelSize`: what a model is made of, counted from its tensor table."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

import torch

from asyncinfer.attention import KVCache
from asyncinfer.models import ModelConfig, tensor_table

__all__ = ["ModelSize", "part_of"]

_MATRIX = re.compile(r"layers\.\d+\.(?:attention|mixer|mlp|shared|predictor)\.\w+\.weight")
_EXPERTS = re.compile(r"layers\.\d+\.experts\.(?:up|down)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters by what a step does with them, and the size of attention. A step reads only the
    experts that its tokens are sent to."""

    #: Looked up by row: the embedding, and learned positions.
    lookup: int
    #: The part of `lookup` that is also multiplied with: a tied head.
    tied: int
    #: A head that is not tied.
    head: int
    #: Matrices of the layers, those of experts aside.
    linear: int
    #: Matrices of all experts, how many experts a layer has, and how many a token takes.
    experts: int
    expert_count: int
    expert_active: int
    #: Norms, biases, routers.
    other: int
    #: Elements of keys and values of one token in one layer, and of one head's keys alone.
    kv_elements: int
    head_dim: int
    #: Elements of the queries of one token in one layer, and of what attention gives for them.
    attention_elements: int
    #: One for each layer with attention: how many tokens it sees; None: all.
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """The size of a model, counted from `tensor_table(config)`."""
        counts = dict.fromkeys(("lookup", "head", "linear", "experts", "other"), 0)
        for name, packed in tensor_table(config).items():
            elements = sum(math.prod(piece.shape) for piece in packed.pieces)
            counts[part_of(name, len(packed.shape))] += elements
        experts = config.experts
        return cls(
            **counts,
            tied=config.vocab_size * config.hidden_size if config.tied_head else 0,
            expert_count=experts.count if experts is not None else 1,
            expert_active=experts.active if experts is not None else 1,
            kv_elements=KVCache.bytes_per_block(config, 1, torch.uint8) // config.num_layers,
            head_dim=config.head_dim,
            attention_elements=config.num_heads * _query_and_value(config),
            windows=tuple(config.layer(index).window for index in config.kv_layers),
        )

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.lookup + self.head + self.linear + self.experts + self.other

    @property
    def layer_parameters(self) -> float:
        """Parameters of the layers that one token is multiplied with."""
        return self.linear + self.experts * self.expert_active / self.expert_count + self.other

    @property
    def head_parameters(self) -> int:
        """Parameters of the head, be it tied or not."""
        return self.head + self.tied

    def experts_read(self, tokens: int) -> float:
        """The share of the experts that `tokens` tokens are sent to, if all are as likely."""
        return float(1.0 - (1.0 - self.expert_active / self.expert_count) ** tokens)

    def tokens_read(self, tokens: int) -> int:
        """Over all layers, how many tokens' keys and values the last of `tokens` attends to."""
        return sum(tokens if window is None else min(tokens, window) for window in self.windows)

    def pairs(self, tokens: int) -> int:
        """Over all layers, pairs of a query and a key in the causal attention of `tokens`."""
        return sum(_pairs(tokens, window) for window in self.windows)


def _query_and_value(config: ModelConfig) -> int:
    latent = config.latent
    if latent is None:
        return 2 * config.head_dim
    # With separate keys and values for each head, which is the cheapest way to compute a prompt.
    return latent.plain + latent.rotated + latent.value


def part_of(name: str, dimensions: int) -> str:
    """The field of `ModelSize` that counts a tensor of the table."""
    if name in ("embedding", "positions"):
        return "lookup"
    if name == "head.weight":
        return "head"
    if _EXPERTS.fullmatch(name):
        return "experts"
    return "linear" if dimensions > 1 and _MATRIX.fullmatch(name) else "other"


def _pairs(tokens: int, window: int | None) -> int:
    seen = tokens if window is None else min(tokens, window)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen
