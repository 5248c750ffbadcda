"""Weights that stay in 4 or 8 bits, against the same weights as floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from asyncinfer.kernels.codes import TABLES
from asyncinfer.quantization import (
    PackedRows,
    QuantisedWeight,
    as_tensor,
    make_grouped_linear,
    make_linear,
)
from asyncinfer.quantization import packed as packed_module
from asyncinfer.quantization.int4 import group_for, quantised_4_bits
from asyncinfer.quantization.packed import PackedLinear

SEED = 20261122


def weight_of(
    outputs: int,
    inputs: int,
    *,
    bits: int = 4,
    group: int = 32,
    offsets: bool = True,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.02,
    scales: torch.dtype = torch.float16,
) -> QuantisedWeight:
    torch.manual_seed(SEED)
    numbers: torch.Tensor
    if bits == 4:
        numbers = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    else:
        numbers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    shape = outputs, inputs // group
    some = (torch.rand(shape) * scale).to(scales)
    shift = (torch.randn(shape) * scale).to(scales) if offsets else None
    return QuantisedWeight(numbers, some, shift, dtype)


def coded(code: str, outputs: int, inputs: int) -> QuantisedWeight:
    """Random numbers of a code in groups of 32; scales of MXFP4 are powers of two."""
    weight = weight_of(
        outputs,
        inputs,
        bits=8 if code == "e4m3" else 4,
        offsets=False,
        scales=torch.float32,
    )
    scales, numbers = weight.scales, weight.numbers
    if code == "e2m1":
        scales = torch.exp2(torch.randint(-9, -3, scales.shape).float())
    if code == "e4m3":
        # Without NaN.
        numbers = torch.where((numbers & 127) == 127, 3, numbers)
    return replace(weight, numbers=numbers, scales=scales, code=code)


@pytest.mark.parametrize("code", [*(code for code in TABLES if code != "int4"), "e4m3"])
def test_numbers_that_stand_for_others(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and products by the kernel and by torch are those of the values, number by number."""
    weight, x = coded(code, 21, 96), torch.randn(3, 96)
    right = torch.empty(21, 96, dtype=torch.float64)
    for row in range(21):
        for column in range(96):
            if code == "e4m3":
                value = weight.numbers[row, column].view(torch.float8_e4m3fn).double().item()
            else:
                number = int(weight.numbers[row, column // 2])
                value = TABLES[code][number >> 4 if column % 2 else number & 15]
            right[row, column] = value * weight.scales[row, column // 32].item()
    torch.testing.assert_close(weight.dequantised().double(), right, rtol=1e-6, atol=0.0)
    for kernel in (packed_module.packed_kernel, lambda *_: None):
        monkeypatch.setattr(packed_module, "packed_kernel", kernel)
        rows = PackedRows(weight)
        torch.testing.assert_close(rows[2:9].double(), right[2:9], rtol=1e-6, atol=0.0)
        some = torch.tensor([7, 0, 7])
        torch.testing.assert_close(rows[some].double(), right[some], rtol=1e-6, atol=0.0)
        y = PackedLinear(rows, None)(x)
        torch.testing.assert_close(y.double(), x.double() @ right.T, rtol=1e-4, atol=1e-3)


def test_codes_below_each_other() -> None:
    """Whole numbers of 8 bits hold those whose values are whole, at some scale."""
    parts = [coded("e2m1", 3, 64), coded("iq4", 2, 64), weight_of(4, 64), weight_of(1, 64, bits=8)]
    assert QuantisedWeight.joinable(parts)
    both = QuantisedWeight.cat(parts)
    assert (both.bits, both.code) == (8, "int")
    right = torch.cat([part.dequantised() for part in parts])
    torch.testing.assert_close(both.dequantised(), right, rtol=1e-6, atol=1e-7)
    alike = QuantisedWeight.cat([coded("nf4", 3, 64), coded("nf4", 2, 64)])
    assert alike.code == "nf4"
    assert not QuantisedWeight.joinable([alike, parts[2]])
    assert not QuantisedWeight.joinable([coded("e4m3", 3, 64), parts[3]])


def floats_of(weight: QuantisedWeight) -> torch.Tensor:
    """The weight number by number, in float64."""
    floats = torch.empty(weight.shape, dtype=torch.float64)
    for row in range(weight.shape[0]):
        for column in range(weight.inputs):
            number = int(weight.numbers[row, column // (8 // weight.bits)])
            if weight.bits == 4:
                number = number >> 4 if column % 2 else number & 15
            group = column // weight.group
            offset = 0.0 if weight.offsets is None else weight.offsets[row, group].item()
            floats[row, column] = number * weight.scales[row, group].item() + offset
    return floats


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 16), (8, 64)])
def test_numbers_scales_and_offsets_make_the_weight(bits: int, group: int, offsets: bool) -> None:
    weight = weight_of(5, 64, bits=bits, group=group, offsets=offsets)
    expected = floats_of(weight)
    assert (weight.bits, weight.group, weight.shape) == (bits, group, (5, 64))
    torch.testing.assert_close(weight.dequantised().double(), expected, rtol=1e-6, atol=1e-7)
    rows = PackedRows(weight)
    assert len(rows) == 5
    # An offset of unsigned numbers is 128 scales away, which costs some of float32's bits.
    torch.testing.assert_close(rows[0:5].double(), expected, rtol=1e-6, atol=1e-6)
    some = torch.tensor([3, 0, 3])
    torch.testing.assert_close(rows[some].double(), expected[some], rtol=1e-6, atol=1e-6)


def test_a_group_takes_its_numbers_a_scale_and_an_offset() -> None:
    assert PackedRows(weight_of(7, 96)).nbytes == 7 * 3 * (16 + 2 + 2)
    assert PackedRows(weight_of(7, 96, bits=8, scales=torch.float32)).nbytes == 7 * 3 * 40
    # float16 has their scales, and there are no offsets.
    assert PackedRows(weight_of(7, 96, bits=8, offsets=False)).nbytes == 7 * 3 * (32 + 2)
    assert PackedRows(coded("nf4", 7, 96)).nbytes == 7 * 3 * (16 + 4)
    assert PackedRows(coded("e2m1", 7, 96)).nbytes == 7 * 3 * (16 + 2)
    weight = weight_of(7, 96)
    assert weight.nbytes == 7 * 3 * (16 + 2 + 2)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 32), (8, 256)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_that_of_the_dequantised_weight(
    bits: int, group: int, rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several tiles, the last of them smaller.
    monkeypatch.setattr(packed_module, "_TILE", 11 * 256)
    weight = weight_of(50, 256, bits=bits, group=group)
    x = torch.randn(rows, 256)
    bias = torch.randn(50) if biased else None
    expected = F.linear(x, weight.dequantised(), bias)
    layer = make_linear(weight, bias)
    assert isinstance(layer, PackedLinear)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_in_16_bits(dtype: torch.dtype) -> None:
    weight = weight_of(24, 64, dtype=dtype)
    x = torch.randn(5, 64).to(dtype)
    y = make_linear(weight)(x)
    assert y.dtype is dtype
    expected = F.linear(x.float(), weight.dequantised(torch.float32))
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scale", [1e-9, 3e5])
def test_scales_that_float16_has_no_room_for(scale: float) -> None:
    weight = weight_of(6, 64, scale=scale, scales=torch.float32)
    expected = weight.dequantised()
    found = PackedRows(weight)[0:6]
    # Half a unit in the last place of float16, of a scale that is counted 15 times, and an offset.
    bound = 2.0**-11 * (15 * weight.scales.max() + weight.offsets.abs().max())  # type: ignore[union-attr]
    assert (found - expected).abs().max() <= bound
    assert found.abs().max() > 0


@pytest.mark.parametrize("code", ["int", "e2m1", "e4m3"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_stays_in_its_group(code: str, broken: float) -> None:
    """As an exponent of 255 in a file of MXFP4 is."""
    weight = weight_of(4, 64, scales=torch.float32) if code == "int" else coded(code, 4, 64)
    right = weight.dequantised()
    weight.scales[2, 1] = broken
    rows = PackedRows(weight)[0:4]
    assert not rows[2, 32:].isfinite().all()
    rows[2, 32:], right[2, 32:] = 0.0, 0.0
    torch.testing.assert_close(rows, right, rtol=1e-3, atol=1e-4)


def test_weights_of_nought() -> None:
    zeros = torch.zeros(3, 2)
    weight = QuantisedWeight(torch.zeros(3, 32, dtype=torch.uint8), zeros, None, torch.float32)
    assert not PackedRows(weight)[0:3].any()
    assert not quantised_4_bits(torch.zeros(3, 64), 32).dequantised().any()


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: (weight[2:5], weight.dequantised()[2:5]),
        lambda weight: (weight.view(2, 3)[1], weight.dequantised().view(2, 3, -1)[1]),
        lambda weight: (weight.view(2, 3).view(-1), weight.dequantised()),
        lambda weight: (weight.regrouped(16), weight.dequantised()),
        lambda weight: (weight.widened(), weight.dequantised()),
        lambda weight: (weight.clone(), weight.dequantised()),
        lambda weight: (weight.to(torch.bfloat16), weight.dequantised().bfloat16()),
    ],
)
def test_parts_and_other_shapes(
    change: Callable[[QuantisedWeight], tuple[QuantisedWeight, torch.Tensor]],
) -> None:
    changed, expected = change(weight_of(6, 64))
    assert torch.equal(as_tensor(changed), expected)


def test_weights_below_each_other() -> None:
    four, eight = weight_of(4, 64), weight_of(3, 64, bits=8, group=16, offsets=False)
    both = QuantisedWeight.cat([four, eight])
    assert (both.bits, both.group) == (8, 16)
    assert torch.equal(both.dequantised(), torch.cat([four.dequantised(), eight.dequantised()]))
    assert QuantisedWeight.cat([four, four]).bits == 4


@pytest.mark.parametrize("group", [32, 128])
def test_4_bits_made_of_floats_are_off_by_half_a_scale(group: int) -> None:
    torch.manual_seed(SEED)
    floats = torch.randn(40, 256) * 0.1
    weight = quantised_4_bits(floats, group)
    off = (weight.dequantised() - floats).abs().view(40, -1, group)
    # And by what float16 rounds of a scale and an offset.
    bound = 0.501 * weight.scales.float() + 2e-4
    assert (off <= bound[..., None]).all()
    assert 0.9 < off.amax() / (weight.scales.float().amax() / 2) < 1.1


@pytest.mark.parametrize(
    ("inputs", "wanted", "found"), [(256, 128, 128), (96, 128, 32), (24, 32, 8), (20, 32, None)]
)
def test_groups_divide_the_inputs(inputs: int, wanted: int, found: int | None) -> None:
    assert group_for(inputs, wanted) == found


@pytest.mark.parametrize(("storage", "group"), [("int4", 32), ("int4-128", 128)])
def test_a_layer_is_made_in_4_bits(storage: str, group: int) -> None:
    torch.manual_seed(SEED)
    floats, x = torch.randn(24, 256), torch.randn(3, 256)
    layer = make_linear(floats, storage=storage)
    assert isinstance(layer, PackedLinear)
    expected = F.linear(x, quantised_4_bits(floats, group).dequantised())
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert layer.rows.nbytes == 24 * 256 // group * (group // 2 + 4)


def test_inputs_that_no_group_divides_take_8_bits() -> None:
    floats, x = torch.randn(6, 20), torch.randn(3, 20)
    got = make_linear(floats, storage="int4")(x)
    assert torch.equal(got, make_linear(floats, storage="int8")(x))


def test_experts() -> None:
    weight = weight_of(3 * 8, 64).view(3, 8)
    layer = make_grouped_linear(weight)
    x, ends = torch.randn(6, 64), torch.tensor([2, 2, 6], dtype=torch.int32)
    floats = weight.dequantised()
    expected = torch.cat([x[:2] @ floats[0].T, x[2:] @ floats[2].T])
    torch.testing.assert_close(layer(x, ends), expected, rtol=1e-4, atol=1e-4)
