"""Every scheme of quantised checkpoints: its `quantization_config`, random tensors that hold a
matrix, and that matrix, dequantised by the scheme's own library where that runs without a GPU
(compressed-tensors, transformers), and else by the format's definition, written out here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import (
    MXFP4PackedCompressor,
    MXFP8QuantizationCompressor,
    NaiveQuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, torch.Tensor]
#: What holds a random matrix [out, in], by suffix; and the matrix in float32.
Held = tuple[Tensors, torch.Tensor]
Make = Callable[[int, int, torch.Generator], Held]


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    make: Make


def numbers(shape: tuple[int, ...], low: int, high: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=random)


def scales(shape: tuple[int, ...], random: torch.Generator, bits: int = 4) -> torch.Tensor:
    """Matrices of all bits are of one size: attention to large ones multiplies what is rounded."""
    return (torch.rand(shape, generator=random) * 0.02 + 0.01) / (1 << max(0, bits - 4))


def eighths(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Random e4m3 numbers, subnormal ones among them."""
    floats = torch.randn(shape, generator=random) * 8
    floats[::3, ::5] *= 2**-12
    return floats.to(torch.float8_e4m3fn)


# --- fp8


def fp8(block: tuple[int, int] | None, name: str, dtype: torch.dtype = torch.float32) -> Make:
    def make(outputs: int, inputs: int, random: torch.Generator) -> Held:
        weight = eighths((outputs, inputs), random)
        size = (1, 1) if block is None else (outputs // block[0], inputs // block[1])
        scale = scales(size, random).to(dtype)
        right = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
        stored = scale.reshape(()) if block is None else scale
        return {".weight": weight, name: stored}, right

    return make


def fp8_static(outputs: int, inputs: int, random: torch.Generator) -> Held:
    parts, right = fp8(None, ".weight_scale")(outputs, inputs, random)
    return {**parts, ".input_scale": torch.tensor(0.5)}, right


def fp8_by_output(outputs: int, inputs: int, random: torch.Generator) -> Held:
    weight, scale = eighths((outputs, inputs), random), scales((outputs, 1), random)
    return {".weight": weight, ".weight_scale": scale}, weight.float() * scale


def fp8_powers(outputs: int, inputs: int, random: torch.Generator) -> Held:
    """The scales of a block are powers of two in a byte."""
    weight = eighths((outputs, inputs), random)
    exponents = numbers((outputs // 16, inputs // 32), 117, 125, random).to(torch.uint8)
    right = Fp8Dequantize(None)._dequantize_one(weight, exponents, torch.float32)
    stored = exponents.view(torch.float8_e8m0fnu)
    return {".weight": weight, ".weight_scale_inv": stored}, right


# --- compressed-tensors


def group(format: str, targets: list[str] | None = None, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": targets or ["Linear"],
                "weights": {"dynamic": False, "observer": "minmax", **weights},
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def integers(packed: bool, **args: Any) -> Make:
    quantised = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=quantised)
    half = 1 << (quantised.num_bits - 1)

    def make(outputs: int, inputs: int, random: torch.Generator) -> Held:
        groups = 1 if quantised.group_size in (None, -1) else inputs // quantised.group_size
        shape = (1,) if quantised.strategy == "tensor" else (outputs, groups)
        state = {
            "weight": numbers((outputs, inputs), -half, half, random).to(torch.int8),
            "weight_scale": scales(shape, random),
        }
        if not quantised.symmetric:
            state["weight_zero_point"] = numbers(shape, -half, half, random).to(torch.int8)
        compressor: Any = NaiveQuantizationCompressor
        if packed:
            compressor = PackedQuantizationCompressor
            state["weight_packed"] = pack_to_int32(state.pop("weight"), quantised.num_bits)
            state["weight_shape"] = torch.tensor([outputs, inputs])
            if not quantised.symmetric:
                zero = pack_to_int32(state["weight_zero_point"], quantised.num_bits, packed_dim=0)
                state["weight_zero_point"] = zero.contiguous()
        right = compressor.decompress(state, scheme)["weight"].float()
        return {f".{name}": tensor for name, tensor in state.items()}, right

    return make


def reordered(outputs: int, inputs: int, random: torch.Generator) -> Held:
    """Inputs in the order of their activations: `weight_g_idx` says which group each is in, as
    releases before 0.10 stored it."""
    q = numbers((outputs, inputs), -8, 8, random).to(torch.int8)
    scale = scales((outputs, inputs // 32), random)
    index = (torch.arange(inputs) // 32)[torch.randperm(inputs, generator=random)]
    parts = {".weight_packed": pack_to_int32(q, 4), ".weight_scale": scale}
    parts |= {".weight_shape": torch.tensor(q.shape), ".weight_g_idx": index.int()}
    return parts, q.float() * scale[:, index]


def floats(strategy: str, **args: Any) -> Make:
    quantised = QuantizationArgs(num_bits=8, type="float", strategy=strategy, **args)
    scheme = QuantizationScheme(targets=["Linear"], weights=quantised)

    def make(outputs: int, inputs: int, random: torch.Generator) -> Held:
        shapes = {"tensor": (1,), "channel": (outputs, 1), "block": (outputs // 16, inputs // 32)}
        state = {
            "weight": eighths((outputs, inputs), random),
            "weight_scale": scales(shapes[strategy], random),
        }
        right = NaiveQuantizationCompressor.decompress(state, scheme)["weight"].float()
        return {f".{name}": tensor for name, tensor in state.items()}, right

    return make


def fourths(compressor: Any, **args: Any) -> Make:
    """4-bit floats by the library's own compressor."""
    quantised = QuantizationArgs(num_bits=4, type="float", **args)
    scheme = QuantizationScheme(targets=["Linear"], weights=quantised)

    def make(outputs: int, inputs: int, random: torch.Generator) -> Held:
        packed = numbers((outputs, inputs // 2), 0, 256, random).to(torch.uint8)
        shape = (outputs, inputs // quantised.group_size)
        state = {"weight_packed": packed}
        if quantised.group_size == 16:
            state["weight_scale"] = (scales(shape, random) * 1000).to(torch.float8_e4m3fn)
            # A power of two: the library computes in bfloat16, which then rounds nothing.
            state["weight_global_scale"] = torch.tensor([1024.0])
        else:
            state["weight_scale"] = numbers(shape, 118, 124, random).to(torch.uint8)
        right = compressor.decompress(dict(state), scheme)["weight"].float()
        return {f".{name}": tensor for name, tensor in state.items()}, right

    return make


def eighths_in_groups(outputs: int, inputs: int, random: torch.Generator) -> Held:
    """MXFP8: a power of two for each 32."""
    quantised = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=quantised)
    state = {
        "weight": eighths((outputs, inputs), random),
        "weight_scale": numbers((outputs, inputs // 32), 118, 124, random).to(torch.uint8),
    }
    right = MXFP8QuantizationCompressor.decompress(dict(state), scheme)["weight"].float()
    return {f".{name}": tensor for name, tensor in state.items()}, right


# --- definitions in plain numpy, where no library runs


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Unsigned numbers `[n, m]` in int32 `[n, m * bits / 32]`, the number `order[i]` of a word's at
    its bits `i * bits`, in order if none is given."""
    each = 32 // bits
    packed = np.zeros((values.shape[0], values.shape[1] // each), np.uint32)
    for place, number in enumerate(order or range(each)):
        packed |= values[:, number::each].numpy().astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32).copy())


def gptq(bits: int, size: int, *, second: bool = False, order: bool = False) -> Make:
    """`(q - zero) * scale`. `qweight[i, o]` has the numbers of inputs `i * 32 / bits` on of the
    output `o`, `qzeros[g, o]` the zeros of outputs `o * 32 / bits` on, less one in the first
    version of the format; `g_idx` the group of each input."""

    def make(outputs: int, inputs: int, random: torch.Generator) -> Held:
        groups = 1 if size == -1 else -(-inputs // size)
        q = numbers((inputs, outputs), 0, 1 << bits, random)
        zero = numbers((groups, outputs), 0, 1 << bits, random)
        scale = scales((groups, outputs), random, bits).half()
        index = torch.arange(inputs) // (inputs if size == -1 else size)
        if order:
            index = index[torch.randperm(inputs, generator=random)]
        stored = zero if second else (zero - 1) % (1 << bits)
        parts = {
            ".qweight": words(q.t(), bits).t().contiguous(),
            ".qzeros": words(stored, bits),
            ".scales": scale,
            ".g_idx": index.int(),
        }
        return parts, ((q - zero[index]) * scale[index].float()).t().contiguous()

    return make


def awq(bits: int, size: int, places: tuple[int, ...]) -> Make:
    """`(q - zero) * scale`, all packed along the outputs: at the bits `i * bits` of a word is the
    output `places[i]` of its eight, or four."""

    def make(outputs: int, inputs: int, random: torch.Generator) -> Held:
        groups = 1 if size == -1 else -(-inputs // size)
        q = numbers((inputs, outputs), 0, 1 << bits, random)
        zero = numbers((groups, outputs), 0, 1 << bits, random)
        scale = scales((groups, outputs), random, bits).half()
        index = torch.arange(inputs) // (inputs if size == -1 else size)
        parts = {".qweight": words(q, bits, places), ".qzeros": words(zero, bits, places)}
        right = ((q - zero[index]) * scale[index].float()).t().contiguous()
        return {**parts, ".scales": scale}, right

    return make


#: Quantiles of the normal distribution, the last of Dettmers et al. (2023), appendix E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))


def bnb4(kind: str, double: bool, dtype: torch.dtype = torch.uint8) -> Make:
    """The first of two numbers is in the high bits of their byte. Each is one of sixteen values,
    times the largest of its block of 64; which in double quantisation is one of 256 values times
    the largest of its block of 256, plus an offset."""
    table = torch.tensor(NF4 if kind == "nf4" else (*FP4, *(-value for value in FP4)))

    def make(outputs: int, inputs: int, random: torch.Generator) -> Held:
        count = outputs * inputs
        q = numbers((count,), 0, 16, random)
        packed = (q[0::2] << 4 | q[1::2]).to(torch.uint8).view(dtype)[:, None].contiguous()
        blocks = -(-count // 64)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16"}
        state["shape"] = [outputs, inputs]
        parts = {".weight": packed, ".weight.quant_map": table}
        if double:
            state |= {"nested_blocksize": 256, "nested_offset": 0.03, "nested_dtype": "float32"}
            nested = torch.linspace(-1, 1, 256)
            of_blocks = numbers((blocks,), 0, 256, random).to(torch.uint8)
            of_them = scales((-(-blocks // 256),), random)
            largest = torch.stack(
                [nested[int(n)] * of_them[i // 256] + 0.03 for i, n in enumerate(of_blocks)]
            )
            parts |= {".weight.absmax": of_blocks, ".weight.nested_absmax": of_them}
            parts[".weight.nested_quant_map"] = nested
        else:
            largest = scales((blocks,), random)
            parts[".weight.absmax"] = largest
        said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts[f".weight.quant_state.bitsandbytes__{kind}"] = said
        right = table[q] * largest[torch.arange(count) // 64]
        return parts, right.view(outputs, inputs)

    return make


def bnb8(outputs: int, inputs: int, random: torch.Generator) -> Held:
    """Bytes, of which 127 stands for the largest of an output."""
    q, largest = numbers((outputs, inputs), -127, 128, random), scales((outputs,), random)
    parts = {".weight": q.to(torch.int8), ".SCB": largest}
    return {**parts, ".weight_format": torch.tensor(0, dtype=torch.uint8)}, (
        q.float() * (largest / 127)[:, None]
    )


def hqq(bits: int, size: int | None, axis: int) -> Make:
    """`(q - zero) * scale` of the matrix as `[groups, size]`, or `[size, groups]` with axis 0. A
    byte has a number of each of its `8 / bits` equal parts of rows, the first in the high bits."""

    def make(outputs: int, inputs: int, random: torch.Generator) -> Held:
        groups = outputs if size is None else outputs * inputs // size
        width = inputs if size is None else size
        shape = (groups, width) if axis == 1 else (width, groups)
        q = numbers(shape, 0, 1 << bits, random)
        each = (groups, 1) if axis == 1 else (1, groups)
        scale, zero = scales(each, random, bits), torch.rand(each, generator=random) * (1 << bits)
        rows = shape[0] * bits // 8
        packed = torch.zeros(rows, shape[1], dtype=torch.long)
        for part in range(8 // bits):
            packed |= q[part * rows : (part + 1) * rows] << (8 - bits * (part + 1))
        parts = {".W_q": packed.to(torch.uint8), ".scale": scale.half(), ".zero": zero.half()}
        parts[".shape"] = torch.tensor([outputs, inputs])
        for name, value in (("nbits", bits), ("axis", axis), ("encoded_state_dict", 1)):
            parts[f".{name}"] = torch.tensor(value, dtype=torch.uint8)
        right = (q - zero.half().float()) * scale.half().float()
        return parts, right.reshape(outputs, inputs)

    return make


def nvfp4_of_modelopt(outputs: int, inputs: int, random: torch.Generator) -> Held:
    """As compressed-tensors', but for the names, and the scale of all multiplies."""
    make = fourths(NVFP4PackedCompressor, strategy="tensor_group", group_size=16)
    parts, right = make(outputs, inputs, random)
    whole = torch.tensor(0.7 / 1024)
    stored = {".weight": parts[".weight_packed"], ".weight_scale": parts[".weight_scale"]}
    return {**stored, ".weight_scale_2": whole, ".input_scale": torch.tensor(1.0)}, (
        right * 1024.0 * whole
    )


def mxfp4_experts(
    experts: int, outputs: int, inputs: int, random: torch.Generator
) -> tuple[Tensors, torch.Tensor]:
    """gpt-oss' experts `[experts, in, out]`, dequantised by transformers."""
    shape = experts, outputs, inputs // 32
    blocks = numbers((*shape, 16), 0, 256, random).to(torch.uint8)
    scale = numbers(shape, 120, 126, random).to(torch.uint8)
    right = convert_moe_packed_tensors(blocks, scale, dtype=torch.float32)
    return {"_blocks": blocks, "_scales": scale}, right


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
CHANNELS = {"num_bits": 8, "strategy": "channel"}


def hqq_config(bits: int, size: int | None, axis: int) -> dict[str, Any]:
    weight = {"nbits": bits, "group_size": size, "axis": axis, "view_as_float": False}
    return {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": weight},
        "skip_modules": ["lm_head"],
    }


CASES: dict[str, Case] = {
    "fp8 in blocks": Case(
        {**BLOCKS, "weight_block_size": [16, 32]}, fp8((16, 32), ".weight_scale_inv")
    ),
    "fp8 in blocks, bfloat16 scales": Case(
        {**BLOCKS, "weight_block_size": [32, 16], "scale_fmt": "ue8m0"},
        fp8((32, 16), ".weight_scale_inv", torch.bfloat16),
    ),
    "fp8 in blocks, powers of two": Case({**BLOCKS, "weight_block_size": [16, 32]}, fp8_powers),
    "fp8 of the whole": Case({**BLOCKS, "weight_block_size": None}, fp8(None, ".weight_scale_inv")),
    "fp8 static": Case({"quant_method": "fp8", "activation_scheme": "static"}, fp8_static),
    "fbgemm_fp8": Case({"quant_method": "fbgemm_fp8"}, fp8_by_output),
    "modelopt fp8": Case({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_static),
    "modelopt nvfp4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, nvfp4_of_modelopt
    ),
    "int4 in groups": Case(group("pack-quantized", **GROUPS), integers(True, **GROUPS)),
    "int4 in groups, asymmetric": Case(
        group("pack-quantized", **GROUPS, symmetric=False),
        integers(True, **GROUPS, symmetric=False),
    ),
    "int4 in groups, reordered": Case(
        group("pack-quantized", **GROUPS, actorder="group"), reordered
    ),
    "int8 packed": Case(
        group("pack-quantized", **CHANNELS, symmetric=False),
        integers(True, **CHANNELS, symmetric=False),
    ),
    "int8 by output": Case(group("int-quantized", **CHANNELS), integers(False, **CHANNELS)),
    "int8 of the whole": Case(
        group("int-quantized", num_bits=8, strategy="tensor", symmetric=False),
        integers(False, num_bits=8, strategy="tensor", symmetric=False),
    ),
    "naive int8 in groups": Case(
        group("naive-quantized", num_bits=8, strategy="group", group_size=16),
        integers(False, num_bits=8, strategy="group", group_size=16),
    ),
    "floats by output": Case(
        group("float-quantized", num_bits=8, type="float", strategy="channel"), floats("channel")
    ),
    "floats of the whole": Case(
        group("naive-quantized", num_bits=8, type="float", strategy="tensor"), floats("tensor")
    ),
    "floats in blocks": Case(
        group(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
        ),
        floats("block", block_structure=[16, 32]),
    ),
    "nvfp4": Case(
        group(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
        fourths(NVFP4PackedCompressor, strategy="tensor_group", group_size=16),
    ),
    "mxfp4 by compressed-tensors": Case(
        group("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        fourths(MXFP4PackedCompressor, strategy="group", group_size=32),
    ),
    "mxfp8": Case(
        group("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
        eighths_in_groups,
    ),
    "gptq": Case(GPTQ, gptq(4, 32)),
    "gptq of the second version": Case(
        {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False}, gptq(4, 32, second=True)
    ),
    "gptq reordered": Case({**GPTQ, "desc_act": True, "group_size": 16}, gptq(4, 16, order=True)),
    "gptq of 8 bits": Case({**GPTQ, "bits": 8, "group_size": -1}, gptq(8, -1)),
    "gptq of 2 bits": Case({**GPTQ, "bits": 2}, gptq(2, 32)),
    "awq": Case(AWQ, awq(4, 32, (0, 2, 4, 6, 1, 3, 5, 7))),
    "awq of 8 bits": Case({**AWQ, "bits": 8, "group_size": -1}, awq(8, -1, (0, 2, 1, 3))),
    "auto-round": Case({**ROUND, "packing_format": "auto_round:auto_gptq"}, gptq(4, 32)),
    "auto-round, zeros as they are": Case(
        {**ROUND, "packing_format": "auto_round"}, gptq(4, 32, second=True)
    ),
    "auto-round as awq": Case(
        {**ROUND, "packing_format": "auto_round:auto_awq"}, awq(4, 32, (0, 2, 4, 6, 1, 3, 5, 7))
    ),
    "nf4, double": Case(
        {**BNB, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, bnb4("nf4", True)
    ),
    "fp4 in bfloat16": Case(
        {**BNB, "bnb_4bit_quant_type": "fp4"}, bnb4("fp4", False, torch.bfloat16)
    ),
    "bitsandbytes int8": Case({**BNB, "load_in_4bit": False, "load_in_8bit": True}, bnb8),
    "hqq": Case(hqq_config(4, 64, 1), hqq(4, 64, 1)),
    "hqq along the other axis": Case(hqq_config(8, 64, 0), hqq(8, 64, 0)),
    "hqq of 2 bits": Case(hqq_config(2, 16, 1), hqq(2, 16, 1)),
}
#: Whose numbers stay as they are: of 4 or 8 bits, in groups of neighbours.
KEPT = frozenset(CASES) - {
    *("int4 in groups, reordered", "gptq reordered", "gptq of 2 bits"),
    *("hqq along the other axis", "hqq of 2 bits"),
}
