"""Sequences whose queries, keys and values are known beforehand, for any attention to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from attention.backends import Backend
from attention.batches import batch_of, scattered_tables
from attention.rounding import poison, rounded
from attention.sequences import give_room

from asyncinfer.attention import Attend, AttentionVariant, KVCache, kv_format

__all__ = ["SCALE", "Case", "Shape", "Step", "right_answer"]

#: Rows of a pass, `(sequence, start, count)`, those of one token first.
Step = Sequence[tuple[int, int, int]]

SCALE = 0.25


@dataclass(frozen=True)
class Shape:
    """Of a model."""

    heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    num_layers: int = 2
    #: 1: the values are the keys.
    kv_parts: int = 2


class Case:
    """Some sequences over a cache that reads as NaN wherever nobody wrote."""

    def __init__(
        self,
        lengths: Sequence[int],
        shape: Shape | None = None,
        *,
        kv: str = "plain",
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape = shape = shape or Shape()
        self.size = block_size
        self.format = kv
        numbers = torch.Generator().manual_seed(3)

        def random(heads: int) -> list[torch.Tensor]:
            """`[length, heads, head_dim]` of each sequence."""
            return [
                torch.randn(n, heads, shape.head_dim, generator=numbers).to(dtype) for n in lengths
            ]

        self.q = random(shape.heads)
        # Scores that differ, so that what a format rounds shows.
        self.k = [each * 3 for each in random(shape.num_kv_heads)]
        self.v = self.k if shape.kv_parts == 1 else random(shape.num_kv_heads)
        blocks = sum(-(-length // block_size) for length in lengths) + 2
        self.tables = scattered_tables(lengths, blocks, block_size)
        self.kv = KVCache.allocate(shape, blocks, block_size, dtype, "cpu", format=kv_format(kv))
        if self.kv.format.exact:
            # For all there is to be kept between passes.
            give_room(self.kv, 1 << 24)
        poison(self.kv)
        #: What came out so far, `[length, heads * head_dim]`; NaN where nothing did.
        self.out = [
            torch.full((n, shape.heads * shape.head_dim), torch.nan, dtype=dtype) for n in lengths
        ]

    def begin(self, backend: Backend, step: Step) -> Attend:
        """A pass over these rows."""
        rows = [(start, count) for _, start, count in step]
        _, batch = batch_of(rows, [self.tables[sequence] for sequence, *_ in step], self.size)
        sequences = [sequence for sequence, *_ in step]
        return backend.make(self.kv, replace(batch, sequences=sequences), SCALE)

    def attend(
        self,
        attention: Attend,
        step: Step,
        variant: AttentionVariant | None = None,
        layer: int = 1,
    ) -> None:
        """One layer of the pass; keeps what comes out."""
        q, k, v = (
            torch.cat([each[sequence][start : start + count] for sequence, start, count in step])
            for each in (self.q, self.k, self.v)
        )
        out = attention(layer, q, k, v, variant)
        parts = out.split([count for *_, count in step])
        for (sequence, start, count), part in zip(step, parts, strict=True):
            self.out[sequence][start : start + count] = part

    def run(
        self, backend: Backend, steps: Sequence[Step], variant: AttentionVariant | None = None
    ) -> None:
        for step in steps:
            self.attend(self.begin(backend, step), step, variant)

    def right(self, variant: AttentionVariant | None, *, held: bool = True) -> list[torch.Tensor]:
        """What is to come out, float64; of keys and values as they are `held`, or as they were."""
        form = self.format if held else "plain"
        return [
            right_answer(q, rounded(k, form), rounded(v, form), variant or AttentionVariant())
            for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]

    def check(self, variant: AttentionVariant | None = None, near: float = 1e-5) -> None:
        """All came out as it is to be."""
        for got, right in zip(self.out, self.right(variant), strict=True):
            torch.testing.assert_close(got.double(), right, rtol=near, atol=near)


def right_answer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: AttentionVariant
) -> torch.Tensor:
    """float64 `[tokens, heads * head_dim]`: every token of a sequence, by the book."""
    tokens, heads, _ = q.shape
    k, v = (each.double().repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    if variant.softcap is not None:
        scores = variant.softcap * (scores / variant.softcap).tanh()
    at = torch.arange(tokens)
    back = at[:, None] - at
    seen = back >= 0
    if variant.window is not None:
        seen &= back < variant.window
    weights = scores.exp() * seen
    total = weights.sum(-1, keepdim=True)
    if variant.sinks is not None:
        total = total + variant.sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, v).flatten(1)
