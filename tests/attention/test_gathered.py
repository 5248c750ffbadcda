"""`GatheredAttention` against the reference twin, on pages poisoned wherever nobody wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from attention.sequences import Sequences, Shape

from asyncinfer.attention import (
    AttentionVariant,
    GatheredAttention,
    begin_attention,
)
from asyncinfer.attention import native as native_module
from asyncinfer.attention import prefill as prefill_module
from asyncinfer.attention import products as products_module
from asyncinfer.attention import varied as varied_module
from asyncinfer.kernels import onednn
from asyncinfer.kernels.threads import FEW_TILES, set_thread_count, share


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
    attention = GatheredAttention(sequences.kv, sequences.batch(rows), 1.0, native=False)
    grouped = [group.kv.rows for group in attention.groups]
    assert sorted(row for rows in grouped for row in rows) == list(range(len(lengths)))
    assert 1 < len(grouped) < len(lengths)


def test_rows_of_like_length_form_one_group() -> None:
    sequences = Sequences(Shape(), [50, 52, 48], block_size=16)
    rows = [(0, (49, 1)), (1, (51, 1)), (2, (47, 1))]
    (group,) = GatheredAttention(sequences.kv, sequences.batch(rows), 1.0, native=False).groups
    assert group.tokens is None


def test_rows_of_few_query_tokens_are_in_groups_too() -> None:
    lengths = [50, 52, 48, 30]
    sequences = Sequences(Shape(), lengths, block_size=16)
    rows = [(0, (49, 1)), (1, (47, 5)), (2, (45, 3)), (3, (0, 30))]
    (group,) = GatheredAttention(sequences.kv, sequences.batch(rows), 1.0, native=False).groups
    assert group.kv.rows == [0, 1, 2]
    assert group.tokens is not None
    assert group.tokens.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8]
    # Rows of one token each are not padded to those of many.
    rows = [(0, (49, 1)), (1, (51, 1)), (2, (15, 33))]
    groups = GatheredAttention(sequences.kv, sequences.batch(rows), 1.0, native=False).groups
    assert [group.kv.rows for group in groups] == [[0, 1], [2]]
    assert [group.size for group in groups] == [2, 33]


@pytest.mark.parametrize("start", [0, 7, 300])
@pytest.mark.parametrize("fast", [True, False])
def test_long_rows(start: int, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fast and not onednn.available(torch.float32):
        pytest.skip("torch without oneDNN")
    monkeypatch.setattr(prefill_module, "native_prefill", lambda *_: None)
    monkeypatch.setattr(prefill_module, "has_faster_product", lambda dtype: fast)
    monkeypatch.setattr(prefill_module, "mkl_keeps_up", lambda: False)
    monkeypatch.setattr(prefill_module, "_TILE_MASK", 1 << 17)
    monkeypatch.setattr(products_module, "_TILE_SCORES", 1 << 14)
    sequences = Sequences(Shape(), [start + 401, 30], block_size=16)
    if start:
        sequences.step([(0, (0, start))])
    got, expected = sequences.step([(0, (start, 401)), (1, (0, 30))])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("start", "count", "keeps_up", "products"),
    [
        (0, 200, True, False),
        (0, 200, False, True),
        (0, 513, True, True),
        (300, 200, True, True),
        (0, 90, False, False),
    ],
)
def test_short_prompts_take_torchs_attention_where_mkl_keeps_up(
    start: int, count: int, keeps_up: bool, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    inner = products_module.attend_by_products

    def spied(q: torch.Tensor, *rest: Any) -> None:
        taken.append(q.shape[0])
        inner(q, *rest)

    monkeypatch.setattr(prefill_module, "attend_by_products", spied)
    monkeypatch.setattr(prefill_module, "native_prefill", lambda *_: None)
    monkeypatch.setattr(prefill_module, "has_faster_product", lambda dtype: True)
    monkeypatch.setattr(prefill_module, "mkl_keeps_up", lambda: keeps_up)
    if products and not onednn.available(torch.float32):
        pytest.skip("torch without oneDNN")
    sequences = Sequences(Shape(), [start + count], block_size=16)
    if start:
        sequences.step([(0, (0, start))])
        taken.clear()
    got, expected = sequences.step([(0, (start, count))])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert taken == ([count] if products else [])


@pytest.mark.parametrize(
    "variant",
    [None, AttentionVariant(window=100), AttentionVariant(softcap=9.0, sinks=torch.arange(6.0))],
    ids=["plain", "window", "sinks"],
)
def test_threads_share_the_tiles_of_a_long_row(
    variant: AttentionVariant | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[int] = []

    def spied(items: Iterable[Any], work: Callable[[Any], None], *, alone: bool = False) -> None:
        tiles = list(items)
        shared.append(0 if alone else len(tiles))
        share(tiles, work, alone=alone)

    monkeypatch.setattr(prefill_module, "native_prefill", lambda *_: None)
    monkeypatch.setattr(prefill_module, "has_faster_product", lambda dtype: False)
    monkeypatch.setattr(prefill_module, "_TILE_MASK", 1 << 14)
    monkeypatch.setattr(varied_module, "_TILE_TOKENS", 32)
    for module in (prefill_module, varied_module):
        monkeypatch.setattr(module, "share", spied)
    sequences = Sequences(Shape(), [320], block_size=16)
    sequences.step([(0, (0, 50))], variant=variant)
    shared.clear()

    def step() -> None:
        set_thread_count(2)
        got, expected = sequences.step([(0, (50, 270))], variant=variant)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    with ThreadPoolExecutor(1) as other:
        other.submit(step).result()
    assert len(shared) == 1
    assert shared[0] > FEW_TILES


def test_cpus_gather() -> None:
    sequences = Sequences(Shape(), [4])
    attend = begin_attention(sequences.kv, sequences.batch([(0, (0, 4))]), 1.0)
    assert isinstance(attend, GatheredAttention)


def test_rows_of_a_layer_without_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that native code took in earlier layers are attended to in the later ones, too."""
    rows = [(0, (9, 1)), (1, (3, 2)), (2, (0, 12))]
    sequences = Sequences(Shape(), [12, 12, 12])
    sequences.native = True
    for layer in range(2):
        sequences.step([(0, (0, 9)), (1, (0, 3))], layer=layer)
    attention = sequences.attention(rows)
    kernel = native_module.decode_kernel
    for layer, found in enumerate((kernel, lambda *about: None)):
        monkeypatch.setattr(native_module, "decode_kernel", found)
        got, expected = sequences.attend(attention, rows, layer)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_block_that_native_code_began_has_no_earlier_numbers() -> None:
    """Later tokens of the block may be more than native code takes, in a group with longer rows."""
    sequences = Sequences(Shape(), [32, 32], block_size=16)
    sequences.native = True
    sequences.step([(0, (0, 16)), (1, (0, 24))])
    sequences.step([(0, (16, 1))])
    got, expected = sequences.step([(0, (17, 6)), (1, (24, 6))])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("start", "count"), [(300, 5), (300, 33), (300, 4), (60, 20), (300, 34)])
def test_few_tokens_are_a_chunk_where_native_code_takes_those(
    native: bool, alone: bool, start: int, count: int
) -> None:
    """Of a long sequence, and those of a single row."""
    shape = Shape(heads=12, num_kv_heads=4, head_dim=64)
    sequences = Sequences(shape, [400, 400, 400], block_size=16, contiguous=True)
    sequences.native = native
    sequences.step([(0, (0, start)), (1, (0, 350)), (2, (0, start))])
    code = prefill_module.native_prefill(torch.device("cpu"), torch.float32, 64, 3, 0.125)
    for step, at in enumerate((start, start + count)):
        rows = [(1, (350 + step, 1)), (0, (at, count)), (2, (at, count))][: 2 if alone else 3]
        attention = sequences.attention(rows)
        got, expected = sequences.attend(attention, rows, 0)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        taken = native and code is not None and count > 4 and (alone or start + count >= 128)
        if not native or count > 4:
            in_group = any(1 in group.kv.rows for group in attention.groups)
            assert in_group == (not taken and count <= 33)
