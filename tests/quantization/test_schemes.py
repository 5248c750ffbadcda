"""Quantised matrices: the numbers of every scheme are its library's, or its definition's."""

from __future__ import annotations

import math
from itertools import product
from random import Random
from typing import Final

import pytest
import torch
from quantization.quantised import CASES, KEPT, Tensors, hqq, mxfp4_experts

from asyncinfer.models.quantised import read_scheme
from asyncinfer.models.reader import JsonReader
from asyncinfer.quantization.schemes import (
    AwqMatrix,
    Fp4Matrix,
    Fp8Matrix,
    GptqMatrix,
    HqqMatrix,
    IntMatrix,
    MatrixFormat,
    Modules,
    RowInt8Matrix,
    Scheme,
)
from asyncinfer.quantization.schemes.matrix import BadPart, Part
from asyncinfer.weights.quantised import torch_dtype

SEED = 11
#: safetensors' names of the dtypes in tests.
NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}


def scheme(config: object) -> Scheme:
    found = read_scheme(JsonReader({"quantization_config": config}, "config.json"))
    assert found is not None
    return found


def held(format: MatrixFormat, shape: tuple[int, ...], tensors: Tensors) -> Tensors:
    """The tensors by the first suffixes of the format's parts, as the loader gives them."""
    parts, left = {}, dict(tensors)
    for part in format.parts(shape):
        for suffix in part.suffixes:
            if suffix not in left:
                continue
            tensor = left.pop(suffix)
            if part.unread:
                continue
            assert not part.shapes or tuple(tensor.shape) in part.shapes
            assert NAMES[tensor.dtype] in part.dtypes
            parts[part.suffixes[0]] = tensor
        assert part.optional or part.suffixes[0] in parts
    assert not left
    return parts


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_the_scheme_s(name: str) -> None:
    """To float32's rounding, whichever rows are asked for."""
    outputs, inputs = 96, 64
    tensors, right = CASES[name].make(outputs, inputs, torch.Generator().manual_seed(SEED))
    format = scheme(CASES[name].config).format("model.layers.0.self_attn.q_proj")
    assert format is not None
    rows = format.rows(held(format, (outputs, inputs), tensors), (outputs, inputs))
    got = rows(0, outputs)
    assert got.dtype is torch.float32
    assert right.std() > 0.01
    torch.testing.assert_close(got, right, rtol=2e-7, atol=1e-9)
    for first, end in ((0, 1), (5, 6), (17, 43), (95, 96)):
        assert torch.equal(rows(first, end), got[first:end])


@pytest.mark.parametrize("name", CASES)
def test_numbers_that_stay_as_they_are(name: str) -> None:
    shape = 96, 64
    tensors, right = CASES[name].make(*shape, torch.Generator().manual_seed(SEED))
    format = scheme(CASES[name].config).format("x")
    assert format is not None
    if not format.keeps(shape):
        assert name not in KEPT
        return
    kept = format.kept(held(format, shape, tensors), shape, torch.bfloat16)
    # Only its tensors say that the inputs are not in order.
    assert (kept is None) == (name == "gptq reordered")
    if kept is None:
        return
    assert name in KEPT
    assert kept.shape == shape
    assert kept.dtype is torch.bfloat16
    assert kept.nbytes < 0.8 * 2 * right.numel()
    # Sums of products with a scale round otherwise than products of a sum.
    atol = 2e-6 * kept.scales.float().max().item() * 256
    torch.testing.assert_close(kept.dequantised(torch.float32), right, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_the_last_group_may_be_smaller(name: str) -> None:
    shape = 32, 72
    tensors, right = CASES[name].make(*shape, torch.Generator().manual_seed(SEED))
    format = scheme(CASES[name].config).format("x")
    assert format is not None
    assert not format.keeps(shape)
    got = format.rows(held(format, shape, tensors), shape)(0, shape[0])
    torch.testing.assert_close(got, right, rtol=2e-7, atol=1e-9)


def test_nan_stays_nan() -> None:
    format = scheme({"quant_method": "fp8"}).format("x")
    assert format is not None
    weight = torch.full((4, 8), torch.nan).to(torch.float8_e4m3fn)
    parts = {".weight": weight, ".weight_scale_inv": torch.tensor(1.0)}
    assert bool(format.rows(parts, (4, 8))(0, 4).isnan().all())


def test_experts_in_mxfp4() -> None:
    shape = 3, 64, 96
    tensors, right = mxfp4_experts(3, 96, 64, torch.Generator().manual_seed(SEED))
    format = scheme({"quant_method": "mxfp4"}).format("model.layers.0.mlp.experts.gate_up_proj")
    assert format is not None
    rows = format.rows(held(format, shape, tensors), shape)
    assert torch.equal(rows(0, 3), right)
    assert torch.equal(rows(1, 2), right[1:2])


@pytest.mark.parametrize("shape", [(130, 200), (128, 128), (7, 300)])
def test_blocks_at_the_edge_are_cut(shape: tuple[int, int]) -> None:
    """As DeepSeek-V3's kv_a_proj_with_mqa, of 576 outputs: the last block is smaller."""
    random = torch.Generator().manual_seed(SEED)
    weight = torch.randn(shape, generator=random).to(torch.float8_e4m3fn)
    blocks = tuple(math.ceil(size / 128) for size in shape)
    scale = torch.rand(blocks, generator=random)
    format = scheme({"quant_method": "fp8", "weight_block_size": [128, 128]}).format("x")
    assert format is not None
    tensors = held(format, shape, {".weight": weight, ".weight_scale_inv": scale})
    got = format.rows(tensors, shape)(0, shape[0])
    for row in range(shape[0]):
        for column in (0, 1, 127, 128, shape[1] - 1):
            if column < shape[1]:
                right = weight[row, column].float() * scale[row // 128, column // 128]
                assert got[row, column] == right


@pytest.mark.parametrize(
    ("names", "inside", "outside"),
    [
        (["lm_head"], ["lm_head"], ["lm_heads", "model.lm"]),
        (["mlp.gate"], ["model.layers.0.mlp.gate"], ["model.layers.0.mlp.gate_proj"]),
        (["model.layers.1"], ["model.layers.1.mlp.up"], ["model.layers.11.mlp.up"]),
        (["re:.*self_attn.*"], ["model.layers.0.self_attn.q"], ["model.layers.0.mlp"]),
        (
            [r"re:.*\.(?:q|k|v|o)_proj(?:\.weight)?$", "re:model.*?mlp"],
            ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp"],
            ["model.layers.0.self_attn.q_norm"],
        ),
        (["model.layers.3*"], ["model.layers.30.mlp"], ["model.layers.2.mlp"]),
        ([], [], ["lm_head"]),
    ],
)
def test_modules_by_name(names: list[str], inside: list[str], outside: list[str]) -> None:
    modules = Modules.of(names)
    assert all(name in modules for name in inside)
    assert not any(name in modules for name in outside)


@pytest.mark.parametrize(
    "name",
    [
        *("re:(a+)+b", "re:(", "re:" + "a" * 501, "re:.*.*.*.*.*x", "re:(a|a){9,}", "*" * 9),
        *("re:" + ".?" * 100 + "!", "re:" + "(.|.)" * 40 + "!"),
    ],
)
def test_an_expression_that_could_take_long_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"repeats|regular|characters|ways"):
        Modules.of([name])


_WHOLE: Final = (None, ".weight_global_scale", ".weight_scale_2")
_GROUPS: Final = (None, 8, 1)
#: The options of every format, as far as `config.json` may set them.
FORMATS = [
    *(
        IntMatrix(bits, group, whole=whole, symmetric=symmetric, reordered=order, packed=packed)
        for bits, group, whole, symmetric, order, packed in product(
            (2, 4, 8), (None, 8, 1), (False, True), (False, True), (False, True), (False, True)
        )
        if not (whole and group)
    ),
    *(Fp4Matrix(group, ".weight", whole) for group in (1, 3, 16) for whole in _WHOLE),
    *(Fp8Matrix(block) for block in (None, (1, 1), (128, 128), (3, 5))),
    *(GptqMatrix(bits, group, order) for bits in (2, 4) for group in _GROUPS for order in (0, 1)),
    *(AwqMatrix(bits, group, zero) for bits in (4, 8) for group in _GROUPS for zero in (0, 1)),
    *(HqqMatrix(bits, group, axis) for bits in (2, 4) for group in _GROUPS for axis in (0, 1)),
    RowInt8Matrix(),
]


def test_tensors_of_any_shape_that_is_allowed_are_read_or_refused() -> None:
    """Whatever shapes and dtypes a format allows its parts, each by itself: a file may have them
    together. Only `BadPart` and `ValueError` name the tensor or the matrix."""
    chance = Random(SEED)
    read, refused = 0, []
    for format, shape in product(FORMATS, ((8, 16), (3, 5), (6, 6), (16, 8), (32, 64))):
        try:
            parts = [part for part in format.parts(shape) if not part.unread]
        except ValueError:
            continue
        for _ in range(6):
            given = {part.suffixes[0]: _any_of(part, shape, chance) for part in parts}
            try:
                rows = format.rows(given, shape)
                assert rows(0, shape[0]).shape == shape
                if format.keeps(shape):
                    format.kept(given, shape, torch.bfloat16)
                read += 1
            except BadPart as error:
                refused.append(error.part)
    assert {*refused} == {".weight_zero_point"}
    assert read > 2 * len(refused)


@pytest.mark.parametrize("size", [1, 3, 6, None])
def test_groups_of_hqq_of_any_size_are_kept(size: int | None) -> None:
    shape, format = (8, 48), HqqMatrix(4, size, 1)
    parts, right = hqq(4, size, 1)(*shape, torch.Generator().manual_seed(SEED))
    assert format.keeps(shape)
    torch.testing.assert_close(format.kept(parts, shape, torch.float32).dequantised(), right)


def _any_of(part: Part, shape: tuple[int, ...], chance: Random) -> torch.Tensor:
    """A tensor that the part may be."""
    dtype = torch_dtype(chance.choice(part.dtypes))
    if part.suffixes[0].endswith("shape"):
        return torch.tensor(shape, dtype=dtype)
    size = chance.choice(part.shapes)
    made = torch.zeros(size, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
    return made.view(dtype) if dtype.itemsize == 1 else made
