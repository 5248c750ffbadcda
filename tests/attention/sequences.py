"""Sequences that grow step by step on pages poisoned wherever nobody wrote."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from attention.batches import Row, batch_of, scattered_tables

from asyncinfer.attention import (
    AttentionBatch,
    AttentionVariant,
    GatheredAttention,
    KVCache,
    KVFormat,
)
from asyncinfer.attention.contiguous import ContiguousKVPool
from asyncinfer.attention.formats import PLAIN
from asyncinfer.kernels import reference

__all__ = ["Sequences", "Shape", "give_room"]


@dataclass
class Shape:
    """Of a model."""

    heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    num_layers: int = 2
    kv_parts: int = 2


def give_room(kv: KVCache, elements: int) -> None:
    """Let copies take so much."""
    layers, parts, _, kv_heads, _, head_dim = kv.storage.shape
    kv.contiguous = ContiguousKVPool(elements, layers * parts * kv_heads * head_dim, kv.dtype)


class Sequences:
    """Rows of random queries, keys and values that grow step by step."""

    def __init__(
        self,
        shape: Shape,
        lengths: list[int],
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        *,
        contiguous: bool = False,
        format: KVFormat = PLAIN,
    ) -> None:
        """`contiguous`: their numbers are known, and there is room for copies."""
        self.shape = shape
        self.size = block_size
        num_blocks = sum(-(-length // block_size) for length in lengths) + 3
        self.tables = scattered_tables(lengths, num_blocks, block_size)
        self.kv = KVCache.allocate(shape, num_blocks, block_size, dtype, "cpu", format=format)
        for tensor in self.kv.tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        self.contiguous = contiguous
        if contiguous:
            give_room(self.kv, 1 << 28)
        #: Tokens of each sequence's prompt; None where they are not known.
        self.prompt_lens: list[int] | None = None
        self.generator = torch.Generator().manual_seed(1)
        #: Whether native code may attend with rows of few query tokens.
        self.native = False

    def step(
        self,
        rows: list[tuple[int, Row]],
        layer: int = 0,
        variant: AttentionVariant | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run `(sequence, (start, count))` rows; give what came out and what the twin says."""
        return self.attend(self.attention(rows), rows, layer, variant)

    def attention(self, rows: list[tuple[int, Row]]) -> GatheredAttention:
        """Of one pass."""
        scale = self.shape.head_dim**-0.5
        return GatheredAttention(self.kv, self.batch(rows), scale, native=self.native)

    def attend(
        self,
        attention: GatheredAttention,
        rows: list[tuple[int, Row]],
        layer: int,
        variant: AttentionVariant | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """One layer of the pass over these rows."""
        batch = self.batch(rows)
        tokens = sum(batch.counts)
        q = self.random(tokens, self.shape.heads)
        k = self.random(tokens, self.shape.num_kv_heads)
        v = self.random(tokens, self.shape.num_kv_heads)
        got = attention(layer, q, k, v, variant)
        if not self.kv.format.exact:
            return (got,)
        variant = variant or AttentionVariant()
        expected = reference.paged_attention(
            q,
            self.kv.k[layer],
            self.kv.v[layer],
            batch.block_tables,
            batch.seq_lens,
            batch.query_starts,
            self.shape.head_dim**-0.5,
            window=variant.window,
            softcap=variant.softcap,
            sinks=variant.sinks,
        )
        return got, expected.flatten(1)

    def batch(self, rows: list[tuple[int, Row]]) -> AttentionBatch:
        _, batch = batch_of([row for _, row in rows], [self.tables[i] for i, _ in rows], self.size)
        if not self.contiguous:
            return batch
        lens = None if self.prompt_lens is None else [self.prompt_lens[i] for i, _ in rows]
        return replace(batch, sequences=[i for i, _ in rows], prompt_lens=lens)

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        values = torch.randn(tokens, heads, self.shape.head_dim, generator=self.generator)
        return values.to(self.kv.dtype)
