"""`KVCache`: sizes, views, block copies."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from asyncinfer.attention import KVCache


@dataclass
class Shape:
    num_layers: int = 3
    num_kv_heads: int = 2
    head_dim: int = 8
    kv_parts: int = 2


def cache() -> KVCache:
    kv = KVCache.allocate(Shape(), 6, 4, torch.float32, "cpu")
    kv.storage.copy_(torch.arange(kv.storage.numel()).view_as(kv.storage))
    return kv


def test_sizes() -> None:
    kv = KVCache.allocate(Shape(), 5, 16, torch.bfloat16, "cpu")
    assert (kv.num_layers, kv.num_blocks, kv.block_size) == (3, 5, 16)
    assert [tuple(layer.shape) for layer in (*kv.k, *kv.v)] == [(5, 2, 16, 8)] * 6
    assert kv.storage.count_nonzero() == 0
    taken = KVCache.bytes_per_block(Shape(), 16, torch.bfloat16) * 5
    assert taken == kv.storage.numel() * kv.storage.element_size()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_is_committed_when_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    kv = KVCache.allocate(Shape(), 1 << 16, 16, torch.float32, "cpu")
    assert kv.storage.nbytes == 384 << 20
    assert kv.storage.data_ptr() % 64 == 0
    assert resident() - before < 32 << 20
    assert kv.k[2][-1].count_nonzero() == 0


def test_keys_and_values_are_views() -> None:
    kv = cache()
    kv.v[1][2] = -1
    assert (kv.storage[1, 1, 2] == -1).all()
    assert (kv.storage == -1).sum() == kv.v[1][2].numel()


def test_copies_read_every_source_first() -> None:
    kv = cache()
    before = kv.storage.clone()
    kv.copy_blocks([(0, 1), (1, 2), (4, 5)])
    before[:, :, [1, 2, 5]] = before[:, :, [0, 1, 4]]
    assert torch.equal(kv.storage, before)
    kv.copy_blocks([])
    assert torch.equal(kv.storage, before)


def test_values_that_are_the_keys() -> None:
    shape = Shape(kv_parts=1)
    kv = KVCache.allocate(shape, 6, 4, torch.float32, "cpu")
    assert (kv.num_layers, kv.num_blocks, kv.block_size) == (3, 6, 4)
    assert 2 * KVCache.bytes_per_block(shape, 4, torch.float32) == KVCache.bytes_per_block(
        Shape(), 4, torch.float32
    )
    kv.k[1][2] = -1
    assert (kv.v[1][2] == -1).all()
    kv.copy_blocks([(2, 5)])
    assert (kv.v[1][5] == -1).all()
