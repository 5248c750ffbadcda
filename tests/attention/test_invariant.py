"""Attention that does not depend on the batch, to the last bit."""

from __future__ import annotations

import random

import pytest
import torch
from attention.batches import batch_of, scattered_tables

from asyncinfer.attention import AttentionVariant, KVCache, begin_attention
from asyncinfer.attention.invariant import InvariantAttention
from asyncinfer.attention.kv import KVShape


class Shape:
    num_layers, num_kv_heads, head_dim, kv_parts = 1, 2, 24, 2


SHAPE: KVShape = Shape()
HEADS = 6
SINKS = torch.linspace(-1.0, 2.0, HEADS)
VARIANTS = {
    "plain": None,
    "window": AttentionVariant(window=9),
    "all": AttentionVariant(window=20, softcap=2.0, sinks=SINKS),
}
LENGTHS = [70, 33, 16, 5]


class Sequences:
    """Queries, keys and values of every position of some sequences, over a poisoned cache."""

    def __init__(self, size: int, dtype: torch.dtype, seed: int) -> None:
        numbers = torch.Generator().manual_seed(5)
        self.size = size

        def random_heads(heads: int) -> list[torch.Tensor]:
            return [
                torch.randn(length, heads, 24, generator=numbers).to(dtype) for length in LENGTHS
            ]

        self.q, self.k, self.v = random_heads(HEADS), random_heads(2), random_heads(2)
        blocks = sum(-(-length // size) for length in LENGTHS) + 2
        self.tables = scattered_tables(LENGTHS, blocks, size, seed)
        self.kv = KVCache.allocate(SHAPE, blocks, size, dtype, "cpu")
        self.kv.storage.fill_(torch.nan)

    def step(
        self, rows: list[tuple[int, int, int]], variant: AttentionVariant | None
    ) -> list[torch.Tensor]:
        """Rows of `(sequence, start, count)`; what each got."""
        _, batch = batch_of(
            [row[1:] for row in rows], [self.tables[row[0]] for row in rows], self.size
        )
        batch.invariant = True
        # Tokens that fill up the pass come last.
        q, k, v = (
            torch.cat([whole[s][a : a + n] for s, a, n in rows] + [torch.ones_like(whole[0][:3])])
            for whole in (self.q, self.k, self.v)
        )
        attend = begin_attention(self.kv, batch, 0.2)
        assert isinstance(attend, InvariantAttention)
        out = attend(0, q, k, v, variant)
        assert out[-3:].eq(0).all()
        return list(out[:-3].split([count for *_, count in rows]))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", [4, 16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_and_batches_change_no_bit(name: str, size: int, dtype: torch.dtype) -> None:
    variant = VARIANTS[name]
    whole = Sequences(size, dtype, 0)
    expected = []
    for sequence, length in enumerate(LENGTHS):
        expected += whole.step([(sequence, 0, length)], variant)

    lot = random.Random(size)
    pieces = Sequences(size, dtype, 1)
    done = [0] * len(LENGTHS)
    while any(at < length for at, length in zip(done, LENGTHS, strict=True)):
        rows = []
        for sequence in lot.sample(range(len(LENGTHS)), lot.randint(1, len(LENGTHS))):
            count = min(lot.choice([1, 1, 2, 7, 16, 30]), LENGTHS[sequence] - done[sequence])
            if count:
                rows.append((sequence, done[sequence], count))
                done[sequence] += count
        rows.sort(key=lambda row: row[2] > 1)
        for (sequence, start, count), out in zip(
            rows, pieces.step(rows, variant) if rows else [], strict=True
        ):
            assert out.equal(expected[sequence][start : start + count])


@pytest.mark.parametrize("name", ["window", "all"])
@pytest.mark.parametrize("size", [4, 16, 24])
def test_what_a_window_no_longer_sees_may_be_gone(name: str, size: int) -> None:
    variant = VARIANTS[name]
    assert variant is not None
    assert variant.window is not None
    (whole,) = Sequences(size, torch.float32, 0).step([(0, 0, 70)], variant)
    cut, done, parts = Sequences(size, torch.float32, 1), 0, []
    for count in (3, 30, 1, 1, 17, *[1] * 18):
        parts += cut.step([(0, done, count)], variant)
        done += count
        for index in range(max(0, done - variant.window + 1) // size):
            if cut.tables[0][index] >= 0:
                cut.kv.storage[:, :, cut.tables[0][index]] = torch.nan
                cut.tables[0][index] = -1
    assert cut.tables[0][0] == -1
    assert torch.equal(torch.cat(parts), whole)
