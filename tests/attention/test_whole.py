"""Attention of whole texts, beside its definition token by token."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from asyncinfer.attention import AttentionBatch, AttentionVariant, WholeAttention

HEADS, KV_HEADS, SIZE = 6, 2, 5
SCALE = 0.3


def batch(counts: list[int], starts: list[int]) -> AttentionBatch:
    rows = len(counts)
    return AttentionBatch(
        block_tables=torch.full((rows, 1), -1, dtype=torch.int32),
        seq_lens=torch.tensor(counts, dtype=torch.int32),
        query_starts=torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32),
        slot_mapping=torch.full((sum(counts),), -1),
        block_size=4,
        decode_rows=0,
        starts=starts,
        counts=counts,
    )


@pytest.mark.parametrize("window", [None, 1, 3, 7, 40])
def test_every_token_sees_its_own_text_within_the_window(window: int | None) -> None:
    generator = torch.Generator().manual_seed(20261124)
    counts = [1, 7, 3, 7]
    total = sum(counts)
    q, k, v = (
        torch.randn(total, heads, SIZE, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    attend = WholeAttention(batch(counts, [0] * len(counts)), SCALE)
    given = attend(0, q, k, v, AttentionVariant(window)).view(total, HEADS, SIZE)
    if window is None:
        torch.testing.assert_close(attend(1, q, k, v).view_as(given), given, rtol=0, atol=0)
    first = 0
    for count in counts:
        for token in range(first, first + count):
            seen = [
                other
                for other in range(first, first + count)
                if window is None or abs(other - token) < window
            ]
            for head in range(HEADS):
                beside = head // (HEADS // KV_HEADS)
                weights = (SCALE * k[seen, beside] @ q[token, head]).softmax(0)
                torch.testing.assert_close(given[token, head], weights @ v[seen, beside])
        first += count


def test_a_row_that_goes_on_is_refused() -> None:
    with pytest.raises(ValueError, match=r"starts=\[0, 4\]"):
        WholeAttention(batch([2, 1], [0, 4]), SCALE)
