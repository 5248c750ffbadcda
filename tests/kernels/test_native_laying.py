"""Numbers laid into blocks by native code are those of torch's operators, whichever part of a
tensor is laid at a time."""

from __future__ import annotations

import pytest
import torch

from asyncinfer.kernels.native import LayingKernels, laying_kernels
from asyncinfer.kernels.orders import NumberOrder, ordered

#: An order, the shape of a tensor in bytes, outputs, bytes of a group's numbers, and of its end.
CASES = {
    "rows": (NumberOrder(), (7, 192), 7, 64, 4),
    "rows of whole groups": (NumberOrder(), (5, 176), 5, 176, 4),
    "rows in short groups": (NumberOrder(flip=0x80), (7, 120), 7, 8, 2),
    "swapped": (NumberOrder(swapped=True), (7, 96), 7, 32, 2),
    "swapped in short groups": (NumberOrder(swapped=True), (7, 96), 7, 24, 8),
    "words": (NumberOrder("words"), (32, 4 * 36), 36, 64, 8),
    "words of 8 bits": (NumberOrder("words", flip=0x80), (32, 4 * 20), 20, 16, 4),
    "words of one output in four": (NumberOrder("words"), (8, 4 * 4), 4, 32, 4),
    "awq": (NumberOrder("awq"), (256, 4 * 12), 96, 64, 4),
    "awq of more than a line": (NumberOrder("awq"), (64, 4 * 20), 160, 16, 8),
}


@pytest.fixture
def kernels() -> LayingKernels:
    found = laying_kernels()
    if found is None:
        pytest.skip("no kernel for this machine")
    return found


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_numbers_lie_where_torch_puts_them(kernels: LayingKernels, name: str, parts: int) -> None:
    order, shape, outputs, numbers, size = CASES[name]
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    stored = some(*shape)
    if order.kind != "rows":
        stored = stored.view(torch.int32)
    right = ordered(stored, order, outputs)
    ends = some(outputs, right.shape[1] // numbers, size)
    assert kernels.takes(order, outputs, numbers)
    blocks = torch.full((*ends.shape[:2], numbers + size), 0xA5, dtype=torch.uint8)
    if order.kind == "rows":
        step = -(-len(stored) // parts)
        for first in range(0, len(stored), step):
            rows = slice(first, first + step)
            kernels.lay(blocks[rows], ends[rows], order, stored[rows])
    else:
        step = len(stored) // parts
        for first in range(0, len(stored), step):
            kernels.lay(blocks, ends, order, stored[first : first + step], first)
    assert torch.equal(blocks[..., numbers:], ends)
    assert torch.equal(blocks[..., :numbers].flatten(1), right)


def test_what_is_laid_by_torch(kernels: LayingKernels) -> None:
    assert not kernels.takes(NumberOrder(), 4, 12)
    assert not kernels.takes(NumberOrder("words"), 4, 24)
    assert not kernels.takes(NumberOrder("words"), 6, 16)
    assert not kernels.takes(NumberOrder("awq"), 40, 16)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x7E])
@pytest.mark.parametrize("place", [0, 41, 95])
def test_numbers_that_are_nan_are_told(kernels: LayingKernels, byte: int, place: int) -> None:
    """As floats of 8 bits: all bits but the sign's are set."""
    stored = torch.zeros(2, 48, dtype=torch.uint8)
    stored.view(-1)[place] = byte
    blocks = torch.empty(2, 3, 20, dtype=torch.uint8)
    ends = torch.zeros(2, 3, 4, dtype=torch.uint8)
    assert kernels.lay(blocks, ends, NumberOrder(), stored) == (byte == 0x7E)
