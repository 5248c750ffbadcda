"""How attention through the paged kernels shares out its keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention.batches import batch_of, scattered_tables

from asyncinfer.attention import KVCache, PagedAttention
from asyncinfer.kernels import ops

LENGTHS = [300, 700, 90]
SIZE = 16


class Shape:
    num_layers, num_kv_heads, head_dim, kv_parts = 2, 2, 16, 2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the kernel is asked for, launch by launch."""
    calls: list[dict[str, Any]] = []
    kernel = ops.paged_attention

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(options)
        return kernel(*arguments, **options)

    monkeypatch.setattr(ops, "paged_attention", noted)
    return calls


def attend(**changes: Any) -> None:
    """Two layers of a pass over decode rows."""
    blocks = sum(-(-length // SIZE) for length in LENGTHS)
    tables = scattered_tables(LENGTHS, blocks, SIZE)
    kv = KVCache.allocate(Shape(), blocks, SIZE, torch.float32, "cpu")
    _, batch = batch_of([(length - 1, 1) for length in LENGTHS], tables, SIZE)
    batch.block_tables.clamp_(min=0)
    for name, value in changes.items():
        setattr(batch, name, value)
    attention = PagedAttention(kv, batch, 0.25)
    for layer in range(2):
        k = torch.ones(3, 2, 16)
        assert attention(layer, torch.ones(3, 4, 16), k, k).isfinite().all()


def test_parts_of_a_length_that_the_batch_was_given(asked: list[dict[str, Any]]) -> None:
    attend(invariant=True, chunk=320)
    # A table is 45 pages of 16 wide: 720 keys.
    assert [(call["chunk"], call["parts"]) for call in asked] == [(320, 3 + 3 * 3)] * 2


def test_one_workspace_a_pass_with_the_counters_it_is_given(asked: list[dict[str, Any]]) -> None:
    counters = torch.zeros(12, dtype=torch.int32)
    attend(arrivals=counters)
    first, second = (call["workspace"] for call in asked)
    assert first is second
    assert first.arrivals is counters
    assert [call["chunk"] for call in asked] == [None] * 2
    assert asked[0]["parts"] > 3
    assert first.holds(3, 4, 16, asked[0]["parts"], 1)
