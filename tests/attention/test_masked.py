"""Attention from tensors alone: rows that fill up a batch."""

from __future__ import annotations

import pytest
import torch
from attention.batches import batch_of, scattered_tables

from asyncinfer.attention import AttentionVariant, DeviceBatch, KVCache
from asyncinfer.attention.kv import KVShape
from asyncinfer.attention.masked import MaskedAttention
from asyncinfer.kernels import reference


class Shape:
    num_layers, num_kv_heads, head_dim, kv_parts = 2, 2, 8, 2


SHAPE: KVShape = Shape()
HEADS, SIZE = 6, 4
LENGTHS = [1, 9, 4, 5, 23]
SINKS = torch.linspace(-1.0, 2.0, HEADS)
VARIANTS = {
    "plain": None,
    "all": AttentionVariant(window=3, softcap=2.0, sinks=SINKS),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_touches_nothing(name: str) -> None:
    padding, numbers = 3, torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers)

    kv = KVCache.allocate(SHAPE, 30, SIZE, torch.float32, "cpu")
    kv.storage.fill_(torch.nan)
    tables = scattered_tables(LENGTHS, 30, SIZE)
    for table, length in zip(tables, LENGTHS, strict=True):
        for p in range(length - 1):
            kv.storage[:, :, table[p // SIZE], :, p % SIZE] = random(2, 2, 2, 8)
    _, batch = batch_of([(length - 1, 1) for length in LENGTHS], tables, SIZE)
    n, layer = len(LENGTHS), 1
    q, k, v = random(n, HEADS, 8), random(n, 2, 8), random(n, 2, 8)

    keys, values = kv.k[layer].clone(), kv.v[layer].clone()
    reference.kv_write(k, v, keys, values, batch.slot_mapping)
    rules = VARIANTS[name] or AttentionVariant()
    tensors = batch.block_tables, batch.seq_lens, batch.query_starts
    options = {"window": rules.window, "softcap": rules.softcap, "sinks": rules.sinks}
    expected = reference.paged_attention(q, keys, values, *tensors, 0.3, **options).flatten(1)

    def filled(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return torch.cat((tensor, tensor.new_full((padding, *tensor.shape[1:]), value)))

    alone = DeviceBatch(
        block_tables=filled(batch.block_tables, 0),
        seq_lens=filled(batch.seq_lens, 0),
        query_starts=torch.arange(n + padding + 1, dtype=torch.int32),
        slot_mapping=filled(batch.slot_mapping, -1),
        block_size=SIZE,
        decode_rows=n + padding,
    )
    before = kv.storage.clone()
    out = MaskedAttention(kv, alone, 0.3)(
        layer, filled(q, 1.0), filled(k, 5.0), filled(v, 5.0), VARIANTS[name]
    )
    torch.testing.assert_close(out[:n], expected, rtol=1e-5, atol=1e-6)
    assert out.isfinite().all()
    written = batch.slot_mapping.tolist()
    behind = {later for slot in written for later in range(slot + 1, slot - slot % SIZE + SIZE)}
    flat, old = (s.transpose(3, 4).flatten(2, 3) for s in (kv.storage, before))
    for slot in range(30 * SIZE):
        now, was = flat[:, :, slot], old[:, :, slot]
        if slot in written:
            row = written.index(slot)
            assert now[layer, 0].equal(k[row])
            assert now[layer, 1].equal(v[row])
            now, was = now[0], was[0]
        if slot in behind:
            assert now[layer].eq(0).all()
            now, was = now[0], was[0]
        torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)


def test_a_batch_of_nothing_but_padding_changes_nothing() -> None:
    kv = KVCache.allocate(SHAPE, 4, SIZE, torch.float32, "cpu")
    kv.storage.uniform_()
    before = kv.storage.clone()
    batch = DeviceBatch(
        block_tables=torch.zeros(2, 3, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        query_starts=torch.arange(3, dtype=torch.int32),
        slot_mapping=torch.full((2,), -1),
        block_size=SIZE,
        decode_rows=2,
    )
    new = torch.ones(2, 2, 8)
    out = MaskedAttention(kv, batch, 0.3)(0, torch.ones(2, HEADS, 8), new, new)
    assert out.eq(0).all()
    assert kv.storage.equal(before)
