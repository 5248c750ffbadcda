"""Matrices in the blocks of GGUF files, alone and below others, against their floats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asyncinfer.kernels.block_types import BLOCK_TYPES
from asyncinfer.quantization import (
    BlockWeight,
    PackedRows,
    PackedWeight,
    QuantisedWeight,
    StackedWeight,
    as_tensor,
    held_for_rows,
    make_grouped_linear,
    make_linear,
    stacked,
)
from asyncinfer.quantization.packed import PackedLinear, StackedLinear

SEED = 20261124


def blocks_of(code: str, outputs: int, inputs: int = 256) -> BlockWeight:
    kind = BLOCK_TYPES[code]
    generator = torch.Generator().manual_seed(SEED + outputs)
    shape = outputs, inputs // kind.numbers * kind.size
    # With the highest bit but one of each byte off, no scale is infinite.
    data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) & 0xBF
    return BlockWeight(data, code, torch.float32)


def whole_numbers(outputs: int, inputs: int = 256) -> QuantisedWeight:
    numbers = torch.arange(outputs * inputs).view(outputs, inputs).to(torch.int8)
    return QuantisedWeight(numbers, torch.full((outputs, 8), 0.01), None, torch.float32)


def mixed() -> tuple[StackedWeight, torch.Tensor]:
    parts: list[PackedWeight] = [blocks_of("q4_k", 12), blocks_of("q6_k", 6), whole_numbers(6)]
    weight = stacked(parts)
    assert isinstance(weight, StackedWeight)
    return weight, torch.cat([part.dequantised() for part in parts])


def close(found: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


def test_rows_are_picked_and_put_in_another_order() -> None:
    weight = blocks_of("q6_k", 12)
    floats = weight.dequantised()
    assert torch.equal(weight[3:9].dequantised(), floats[3:9])
    assert torch.equal(weight.view(3, 4)[1].clone().dequantised(), floats[4:8])
    order = torch.tensor([7, 0, 3])
    assert torch.equal(weight[order].dequantised(), floats[order])
    assert weight[order].nbytes == 3 * BLOCK_TYPES["q6_k"].size


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_of_several_formats_is_that_of_their_floats(rows: int, biased: bool) -> None:
    weight, floats = mixed()
    bias = torch.randn(24) if biased else None
    layer, x = make_linear(weight, bias), torch.randn(rows, 256)
    assert isinstance(layer, StackedLinear)
    close(layer(x), F.linear(x, floats, bias))


def test_formats_keep_their_sizes_and_neighbours_of_one_format_become_one() -> None:
    weight, _ = mixed()
    assert weight.nbytes == 12 * 144 + 6 * 210 + 6 * (256 + 4 * 8)
    joined = stacked([blocks_of("q4_k", 3), blocks_of("q4_k", 2)])
    assert isinstance(joined, BlockWeight)
    assert joined.shape == (5, 256)
    whole = stacked([whole_numbers(3), whole_numbers(2)])
    assert isinstance(whole, QuantisedWeight)


def test_rows_of_several_formats_in_another_order() -> None:
    """As heads are, whose halves are put apart: those of one format stay together."""
    weight, floats = mixed()
    order = torch.cat((torch.arange(12).view(6, 2).t().flatten(), torch.arange(12, 24)))
    found = weight[order]
    assert isinstance(found, StackedWeight)
    assert len(found.parts) == 3
    assert torch.equal(found.dequantised(), floats[order])
    assert torch.equal(weight[10:20].dequantised(), floats[10:20])
    across = torch.tensor([0, 20, 1, 13])
    assert torch.equal(weight[across].dequantised(), floats[across])
    assert torch.equal(weight.clone().dequantised(), floats)


def test_experts_of_several_formats_are_held_in_one() -> None:
    weight, floats = mixed()
    assert weight.view(24) is weight
    experts = weight.view(4, 6)
    assert isinstance(experts, QuantisedWeight)
    close(experts.dequantised(), floats.view(4, 6, 256))
    x, ends = torch.randn(5, 256), torch.tensor([2, 2, 4, 5], dtype=torch.int32)
    right = torch.cat((x[:2] @ floats[:6].T, x[2:4] @ floats[12:18].T, x[4:] @ floats[18:].T))
    close(make_grouped_linear(experts)(x, ends), right)
    # Whole numbers do not hold those of a table.
    other = stacked([blocks_of("q8_0", 2), QuantisedWeight.cat([nf4(2)])])
    assert torch.equal(as_tensor(other.view(2, 2)), other.dequantised().view(2, 2, 256))


def nf4(outputs: int) -> QuantisedWeight:
    numbers = torch.arange(outputs * 128).view(outputs, 128).to(torch.uint8)
    return QuantisedWeight(numbers, torch.ones(outputs, 4), None, torch.float32, "nf4")


def test_experts_in_blocks() -> None:
    weight = blocks_of("q5_k", 12).view(3, 4)
    x, ends = torch.randn(6, 256), torch.tensor([2, 2, 6], dtype=torch.int32)
    floats = weight.dequantised()
    right = torch.cat([x[:2] @ floats[0].T, x[2:] @ floats[2].T])
    close(make_grouped_linear(weight)(x, ends), right)


def test_other_storage_is_made_of_the_numbers() -> None:
    weight, x = blocks_of("q6_k", 8), torch.randn(3, 256)
    found = make_linear(weight, storage="floats")(x)
    assert torch.equal(found, make_linear(weight.dequantised(), storage="floats")(x))


def test_a_table_of_rows() -> None:
    weight = blocks_of("q3_k", 8)
    rows = held_for_rows(weight)
    assert isinstance(rows, PackedRows)
    some = torch.tensor([5, 1, 5])
    close(rows[some], weight.dequantised()[some])
    x = torch.randn(2, 256)
    layer = make_linear(rows)
    assert isinstance(layer, PackedLinear)
    close(layer(x), x @ weight.dequantised().T)
