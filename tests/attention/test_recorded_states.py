"""States of decode rows by pages that the device knows, against those by pages of the host."""

from __future__ import annotations

import torch

from asyncinfer.attention import RecordedStates, StateCache, StatePass, StateRows, StateShape

BLOCK, PAGES, LAYERS = 4, 9, (1, 3)
SHAPES = [StateShape((2, 3)), StateShape((5,), torch.float64)]


def cache(seed: int) -> StateCache:
    """Every page holds a state, and the spare one and those of no sequence NaN."""
    numbers = torch.Generator().manual_seed(seed)
    made = StateCache(SHAPES, PAGES, BLOCK, torch.float32, LAYERS)
    for tensor in made.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=numbers))
        tensor[0] = tensor[PAGES] = torch.nan
    return made


def test_rows_and_padding() -> None:
    """One row begins, one goes on in its block, one begins a block, one has a page that was never
    written behind it."""
    tables = torch.tensor([[0, -1, -1], [2, 3, -1], [4, 5, -1], [6, 7, 8]], dtype=torch.int32)
    positions = [0, 6, 4, 11]
    by_host, by_device = cache(1), cache(1)
    rows = StateRows.of(positions, [1] * 4, tables.numpy(), BLOCK)
    expected = StatePass(by_host, rows, range(4))
    # Rows of padding have position 0, and whatever table.
    found = RecordedStates(
        by_device,
        torch.cat((tables, tables[:2])),
        torch.tensor([*positions, 0, 0]),
        torch.tensor([1, 7, 5, 12, 0, 0], dtype=torch.int32),
    )
    assert found.spans.single
    numbers = torch.Generator().manual_seed(2)
    for layer in LAYERS:
        before = zip(expected.before(layer), found.before(layer), strict=True)
        for right, held in before:
            assert torch.equal(held[:4], right)
            assert (held[0] == 0).all()
        states = [
            torch.randn(6, *shape.shape, generator=numbers).to(shape.dtype or torch.float32)
            for shape in SHAPES
        ]
        expected.keep(layer, *(each[:4] for each in states))
        found.keep(layer, *states)
    untouched = cache(1)
    for one, other in zip(by_device.tensors, untouched.tensors, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), "written before the commit"
    expected.commit()
    found.commit()
    for right, held in zip(by_host.tensors, by_device.tensors, strict=True):
        assert torch.equal(held[:PAGES].nan_to_num(), right[:PAGES].nan_to_num())
        assert held[PAGES].isfinite().all(), "what padding gives lies on the spare page"
