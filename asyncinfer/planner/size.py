"""`ModelSize`: what a model is made of, counted from its tensor table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from asyncinfer.attention import KVCache
from asyncinfer.models import ModelConfig, tensor_table
from asyncinfer.runner.memory import kv_layer_bytes

__all__ = ["AttentionSize", "ModelSize", "part_of"]

_MATRIX = re.compile(
    r"layers\.\d+\.(?:attention|mixer|mlp|shared|predictor|per_layer)\.\w+\.weight"
)
_EXPERTS = re.compile(r"layers\.\d+\.experts\.(?:up|down)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSize:
    """The attention of one layer."""

    #: How many tokens a token attends to; None: all.
    window: int | None
    #: Whether `window` is the length of a chunk, in which a token attends to those before it.
    chunked: bool = False
    #: Elements of the keys and values of one token that it reads.
    kv_elements: int
    #: Elements of one token's queries, and of what attention gives for them.
    elements: int


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
    #: Elements of one token's keys and values by layer, 0 where a layer keeps none; and of one
    #: head's keys alone.
    kv_elements: tuple[int, ...]
    head_dim: int
    #: One for each layer with attention; two where an indexer chooses a token's keys.
    attention: tuple[AttentionSize, ...]

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
            kv_elements=kv_layer_bytes(config, 1, torch.uint8),
            head_dim=config.head_dim,
            attention=tuple(_attention(config)),
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

    def kv_read(self, tokens: int) -> int:
        """Over all layers, elements of the keys and values that the last of `tokens` attends to."""
        return sum(each.kv_elements * _seen(tokens, each) for each in self.attention)

    def multiplied(self, tokens: int) -> int:
        """Over all layers, products of two elements in the causal attention of `tokens`."""
        return sum(each.elements * _pairs(tokens, each) for each in self.attention)


def _attention(config: ModelConfig) -> Iterator[AttentionSize]:
    latent = config.latent
    for index in range(config.num_layers):
        layer, kv = config.layer(index), config.layer_kv(index)
        if not layer.attends:
            continue
        each = 2 * kv.head_dim
        if latent is not None:
            # With separate keys and values for each head, which is the cheapest way to compute a
            # prompt.
            each = latent.plain + latent.rotated + latent.value
        read = 0 if config.bidirectional else KVCache.bytes_per_block(kv, 1, torch.uint8)
        indexer = None if latent is None else latent.indexer
        if indexer is not None:
            # The indexer reads its keys of all tokens, and attention the vectors of those chosen.
            read -= indexer.size
            scored = indexer.heads * indexer.size
            yield AttentionSize(window=None, kv_elements=indexer.size, elements=scored)
            chosen = config.num_heads * each
            yield AttentionSize(window=indexer.most, kv_elements=read, elements=chosen)
            continue
        yield AttentionSize(
            window=layer.window,
            chunked=layer.chunked,
            kv_elements=read,
            elements=config.num_heads * each,
        )
    if config.head_kv is not None:
        # Only the bytes that the head's attention reads are known here.
        read = KVCache.bytes_per_block(config.head_kv, 1, torch.uint8)
        yield AttentionSize(window=None, kv_elements=read, elements=0)


def part_of(name: str, dimensions: int) -> str:
    """The field of `ModelSize` that counts a tensor of the table."""
    if name in ("embedding", "positions", "per_layer.embedding"):
        return "lookup"
    if name == "head.weight":
        return "head"
    if _EXPERTS.fullmatch(name):
        return "experts"
    return "linear" if dimensions > 1 and _MATRIX.fullmatch(name) else "other"


def _seen(tokens: int, attention: AttentionSize) -> int:
    """How many tokens the last of `tokens` attends to."""
    window = attention.window
    if window is None:
        return tokens
    return (tokens - 1) % window + 1 if attention.chunked else min(tokens, window)


def _pairs(tokens: int, attention: AttentionSize) -> int:
    """The sum of how many tokens each of `tokens` attends to."""
    window = attention.window
    if window is None or window >= tokens:
        return tokens * (tokens + 1) // 2
    first = window * (window + 1) // 2
    if attention.chunked:
        rest = tokens % window
        return tokens // window * first + rest * (rest + 1) // 2
    return first + (tokens - window) * window
