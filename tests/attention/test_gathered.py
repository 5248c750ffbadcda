"""`GatheredAttention` against the reference twin, on pages poisoned wherever nobody wrote."""

from __future__ import annotations

import pytest
import torch
from attention.batches import Row, batch_of, scattered_tables
from attention.sequences import Sequences, Shape

from asyncinfer.attention import (
    AttentionVariant,
    GatheredAttention,
    KVCache,
    PagedAttention,
    begin_attention,
)
from asyncinfer.attention import prefill as prefill_module
from asyncinfer.attention import varied as varied_module
from asyncinfer.kernels import onednn


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1), (14, 2), (8, 8)])
def test_agrees_with_the_reference(head_dim: int, heads: int, kv_heads: int) -> None:
    sequences = Sequences(Shape(heads, kv_heads, head_dim), [40, 9, 33, 21], block_size=16)
    steps: list[list[tuple[int, Row]]] = [
        [(0, (0, 31)), (1, (0, 8)), (2, (0, 32))],
        [(0, (31, 1)), (1, (8, 1)), (2, (32, 1)), (3, (0, 20))],
        [(3, (20, 1)), (0, (32, 8))],
    ]
    for rows in steps:
        got, expected = sequences.step(rows)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 61])
def test_page_borders_token_by_token(length: int) -> None:
    sequences = Sequences(Shape(), [length, 64])
    sequences.step([(1, (0, 63))])
    for at in range(length):
        got, expected = sequences.step([(0, (at, 1)), (1, (63, 1))])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_block_handed_on_full_of_nan_poisons_nobody() -> None:  # fault 26
    sequences = Sequences(Shape(), [20, 20])
    sequences.step([(0, (0, 18)), (1, (0, 3))])
    # The second row's next block was a failed request's, and so were its own first block's slots
    # before it began: padding and masked slots are read, with a weight of zero.
    got, expected = sequences.step([(1, (3, 1)), (0, (18, 1))])
    assert torch.isfinite(got).all()
    got, expected = sequences.step([(1, (4, 1)), (0, (19, 1))])
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_only_begun_blocks_are_cleared() -> None:
    sequences = Sequences(Shape(), [8])
    sequences.step([(0, (0, 6))])
    before = sequences.kv.k[0].clone()
    sequences.step([(0, (6, 1))])
    written = sequences.tables[0][1], slice(None), 2
    before[written] = sequences.kv.k[0][written]
    assert torch.equal(before.nan_to_num(-1), sequences.kv.k[0].nan_to_num(-1))


def test_layers_are_apart() -> None:
    sequences = Sequences(Shape(), [12])
    sequences.step([(0, (0, 11))], layer=1)
    assert torch.isfinite(sequences.kv.k[1][sequences.tables[0][:2]]).all()
    assert torch.isnan(sequences.kv.k[0][sequences.tables[0][0]]).all()


def test_rows_of_very_different_length_form_several_groups() -> None:
    lengths = [900, 5, 6, 880, 300, 17, 310, 1]
    sequences = Sequences(Shape(), lengths, block_size=16)
    for row, length in enumerate(lengths):
        if length > 1:
            sequences.step([(row, (0, length - 1))])
    rows = [(row, (length - 1, 1)) for row, length in enumerate(lengths)]
    got, expected = sequences.step(rows)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    attention = GatheredAttention(sequences.kv, sequences.batch(rows), 1.0)
    grouped = [group.rows.tolist() for group in attention._groups if group.rows is not None]
    assert sorted(row for rows in grouped for row in rows) == list(range(len(lengths)))
    assert 1 < len(grouped) < len(lengths)


def test_rows_of_like_length_form_one_group() -> None:
    sequences = Sequences(Shape(), [50, 52, 48], block_size=16)
    rows = [(0, (49, 1)), (1, (51, 1)), (2, (47, 1))]
    (group,) = GatheredAttention(sequences.kv, sequences.batch(rows), 1.0)._groups
    assert group.rows is None


@pytest.mark.parametrize("start", [0, 7, 300])
@pytest.mark.parametrize("fast", [True, False])
def test_long_rows(start: int, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fast and not onednn.available(torch.float32):
        pytest.skip("torch without oneDNN")
    monkeypatch.setattr(prefill_module, "_has_faster_product", lambda dtype: fast)
    monkeypatch.setattr(prefill_module, "_TILE_SCORES", 1 << 14)
    sequences = Sequences(Shape(), [start + 401, 30], block_size=16)
    if start:
        sequences.step([(0, (0, start))])
    got, expected = sequences.step([(0, (start, 401)), (1, (0, 30))])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16() -> None:
    sequences = Sequences(Shape(), [200, 40], block_size=16, dtype=torch.bfloat16)
    got, expected = sequences.step([(0, (0, 199))])
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    got, expected = sequences.step([(0, (199, 1)), (1, (0, 40))])
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_the_paged_kernels_write_and_attend_alike() -> None:
    shape, rows = Shape(), [(20, 1), (0, 13)]
    tables = scattered_tables([21, 13], 12, 4)
    _, batch = batch_of(rows, tables, 4)
    caches = [KVCache.allocate(shape, 12, 4, torch.float32, "cpu") for _ in range(2)]
    torch.manual_seed(0)
    past = torch.randn(caches[0].storage.shape)
    q, k, v = torch.randn(14, 6, 16), torch.randn(14, 2, 16), torch.randn(14, 2, 16)
    results = []
    for kv, attention in zip(caches, (GatheredAttention, PagedAttention), strict=True):
        kv.storage.copy_(past)
        results.append(attention(kv, batch, 0.25)(1, q, k, v))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    # The gathered one clears what lies behind a begun block's tokens; what is valid is equal.
    for row, (start, count) in enumerate(rows):
        for at in range(start + count):
            place = 1, slice(None), tables[row][at // 4], slice(None), at % 4
            assert torch.equal(caches[0].storage[place], caches[1].storage[place])


SINKS = torch.linspace(-2, 3, 6)
VARIANTS = {
    "window": AttentionVariant(window=7),
    "window of one": AttentionVariant(window=1),
    "window of a block": AttentionVariant(window=4),
    "window beyond everything": AttentionVariant(window=1000),
    "soft cap": AttentionVariant(softcap=0.5),
    "sinks": AttentionVariant(sinks=SINKS),
    "everything": AttentionVariant(window=10, softcap=2.0, sinks=SINKS),
}


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("tile", [3, 128])
def test_variants(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the reference twin: prefill, chunks, decode, and all of them in one batch, with rows
    shorter and much longer than the window."""
    monkeypatch.setattr(varied_module, "_TILE_TOKENS", tile)
    variant = VARIANTS[name]
    sequences = Sequences(Shape(), [70, 3, 9, 41])
    steps: list[list[tuple[int, Row]]] = [
        [(0, (0, 60)), (2, (0, 8))],
        [(1, (0, 1)), (0, (60, 1)), (2, (8, 1)), (3, (0, 25))],
        [(1, (1, 1)), (0, (61, 2)), (3, (25, 9))],
        [(0, (63, 1)), (1, (2, 1)), (3, (34, 1))],
    ]
    for rows in steps:
        got, expected = sequences.step(rows, variant=variant)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_layers_of_one_pass_may_differ() -> None:
    sequences = Sequences(Shape(), [40])
    sequences.step([(0, (0, 39))])
    batch = sequences.batch([(0, (39, 1))])
    attention = GatheredAttention(sequences.kv, batch, 0.25)
    q, k, v = (sequences.random(1, heads) for heads in (6, 2, 2))
    plain, windowed, again = (
        attention(0, q, k, v, variant) for variant in (None, AttentionVariant(window=3), None)
    )
    assert torch.equal(plain, again)
    assert (plain - windowed).abs().max() > 0.01


@pytest.mark.parametrize("count", [1, 5])
def test_pages_outside_the_window_are_never_read(count: int) -> None:
    window, start = 6, 38
    sequences = Sequences(Shape(), [start + count])
    sequences.step([(0, (0, start))])
    unseen = (start - window + 1) // sequences.size
    assert unseen >= 8
    sequences.kv.storage[:, :, sequences.tables[0][:unseen]] = float("nan")
    got, expected = sequences.step([(0, (start, count))], variant=AttentionVariant(window=window))
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", [None, AttentionVariant(window=9)])
def test_values_that_are_the_keys(variant: AttentionVariant | None) -> None:
    """Against a cache that holds them twice."""
    steps: list[list[tuple[int, Row]]] = [
        [(0, (0, 30)), (1, (0, 7))],
        [(0, (30, 1)), (1, (7, 1))],
        [(1, (8, 1)), (0, (31, 5))],
    ]
    one, two = (Sequences(Shape(num_kv_heads=1, kv_parts=parts), [40, 12]) for parts in (1, 2))
    for rows in steps:
        results = []
        for sequences in (one, two):
            batch = sequences.batch(rows)
            q, k = (sequences.random(sum(batch.counts), heads) for heads in (6, 1))
            results.append(GatheredAttention(sequences.kv, batch, 0.25)(1, q, k, k, variant))
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_the_paged_kernels_vary_alike() -> None:
    tables = scattered_tables([21, 13], 12, 4)
    _, batch = batch_of([(20, 1), (0, 13)], tables, 4)
    torch.manual_seed(0)
    past = torch.randn(2, 2, 12, 2, 4, 16)
    q, k, v = torch.randn(14, 6, 16), torch.randn(14, 2, 16), torch.randn(14, 2, 16)
    results = [
        attention(KVCache([past.clone()]), batch, 0.25)(1, q, k, v, VARIANTS["everything"])
        for attention in (GatheredAttention, PagedAttention)
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_cpus_gather() -> None:
    sequences = Sequences(Shape(), [4])
    attend = begin_attention(sequences.kv, sequences.batch([(0, (0, 4))]), 1.0)
    assert isinstance(attend, GatheredAttention)
