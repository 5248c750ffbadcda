"""From `quantization_config` in a checkpoint's `config.json` to a `Scheme`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from asyncinfer.files import QUANT_JSON
from asyncinfer.models.quantised.auto_round import auto_round
from asyncinfer.models.quantised.compressed_tensors import compressed_tensors
from asyncinfer.models.quantised.keys import (
    MOST_GROUP,
    check_few,
    check_known,
    modules_of,
    read_bits,
    read_group,
    read_modules,
    read_names,
)
from asyncinfer.models.quantised.modelopt import modelopt
from asyncinfer.models.reader import JsonReader
from asyncinfer.quantization.schemes import (
    AwqMatrix,
    Bnb4Matrix,
    Fp8Matrix,
    GptqMatrix,
    HqqMatrix,
    MatrixFormat,
    Modules,
    Mxfp4Experts,
    RowInt8Matrix,
    Scheme,
)

__all__ = ["read_scheme"]

_BITS: Final = (2, 4, 8)


def read_scheme(config: JsonReader) -> Scheme | None:
    """How the checkpoint with this `config.json` is quantised; None: it is not. `ModelLoadError`
    names an unknown method, and an option that is not supported."""
    # Old compressed-tensors checkpoints use the second name, and have no `quant_method`.
    part = config.object("quantization_config") or config.object("compression_config")
    if part is None:
        text = config.object("text_config")
        found = None if text is None else read_scheme(text)
        beside = config.object(QUANT_JSON)
        return _scheme(beside) if found is None and beside is not None else found
    return _scheme(part)


def _scheme(part: JsonReader) -> Scheme | None:
    default = ""
    inner = part.object("quantization")
    if inner is not None and not part.has("quant_method"):
        # What NVIDIA's Model Optimizer writes into hf_quant_config.json.
        part, default = inner, "modelopt"
        if not part.has("quant_algo"):
            # Keys and values alone are quantised.
            return None
    if part.values.get("load_in_4bit") or part.values.get("load_in_8bit"):
        default = "bitsandbytes"
    elif part.has("config_groups"):
        default = "compressed-tensors"
    method = part.string("quant_method", default).lower()
    read = _METHODS.get(_ALIASES.get(method, method))
    if read is None:
        known = ", ".join(_METHODS)
        raise part.refuse("quant_method", f"is not known; must be one of {known}")
    return read(part)


def _fp8(config: JsonReader) -> Scheme:
    check_known(config, "fmt", ("e4m3", "float8_e4m3fn"))
    check_known(config, "activation_scheme", ("dynamic", "static"))
    check_known(config, "expert_dtype", ("fp8",))
    block = None
    if config.has("weight_block_size"):
        outputs, inputs = config.integers("weight_block_size", 2, 1, MOST_GROUP)
        block = outputs, inputs
    skipped = read_modules(config, "modules_to_not_convert", "ignored_layers")
    return Scheme("fp8", ((None, Fp8Matrix(block)),), skipped)


def _fbgemm_fp8(config: JsonReader) -> Scheme:
    skipped = read_modules(config, "modules_to_not_convert")
    return Scheme("fbgemm_fp8", ((None, Fp8Matrix()),), skipped)


def _mxfp4(config: JsonReader) -> Scheme:
    skipped = read_modules(config, "modules_to_not_convert")
    experts = Modules.of(["mlp.experts"])
    return Scheme("mxfp4", ((experts, Mxfp4Experts()),), skipped)


def _gptq(config: JsonReader) -> Scheme:
    check_known(config, "pack_dtype", ("int32",))
    if config.boolean("is_marlin_format", False):
        raise config.refuse("is_marlin_format", "only GPTQ's own layout is supported")
    formats: list[tuple[Modules | None, MatrixFormat]] = []
    skipped = read_names(config, "modules_to_not_convert")
    overrides = config.object("dynamic")
    check_few(config, "dynamic", overrides)
    for pattern in overrides.values if overrides is not None else ():
        assert overrides is not None
        expression = f"re:{pattern.removeprefix('+:').removeprefix('-:')}"
        if pattern.startswith("-:"):
            skipped.append(expression)
            continue
        override = overrides.object(pattern)
        changed = override.values if override is not None else {}
        modules = modules_of(overrides, pattern, [expression])
        formats.append((modules, _gptq_matrix(config.replaced(changed))))
    formats.append((None, _gptq_matrix(config)))
    return Scheme("gptq", tuple(formats), modules_of(config, "dynamic", skipped))


def _gptq_matrix(config: JsonReader) -> GptqMatrix:
    layouts = ("gptq", "gptq_v2")
    for key in ("checkpoint_format", "format"):
        check_known(config, key, layouts)
    layout = config.string("checkpoint_format", config.string("format", "gptq"))
    return GptqMatrix(
        bits=read_bits(config, "bits", _BITS),
        group=read_group(config, "group_size", -1),
        reordered=config.boolean("desc_act", False),
        second_version=layout == "gptq_v2",
    )


def _awq(config: JsonReader) -> Scheme:
    for key in ("version", "format"):
        check_known(config, key, ("gemm", "GEMM"))
    bits = "bits" if config.has("bits") else "w_bit"
    group = "group_size" if config.has("group_size") else "q_group_size"
    format = AwqMatrix(
        bits=read_bits(config, bits, (4, 8)),
        group=read_group(config, group, 128),
        zero_point=config.boolean("zero_point", True),
    )
    return Scheme("awq", ((None, format),), read_modules(config, "modules_to_not_convert"))


def _bitsandbytes(config: JsonReader) -> Scheme:
    skipped = read_modules(config, "llm_int8_skip_modules")
    format: MatrixFormat
    if config.boolean("load_in_4bit", False):
        check_known(config, "bnb_4bit_quant_type", ("nf4", "fp4"))
        format = Bnb4Matrix(
            config.string("bnb_4bit_quant_type", "fp4"),
            config.boolean("bnb_4bit_use_double_quant", False),
        )
    elif config.boolean("load_in_8bit", False):
        format = RowInt8Matrix()
    else:
        raise config.refuse("load_in_4bit", "either this or load_in_8bit must be true")
    return Scheme("bitsandbytes", ((None, format),), skipped)


def _hqq(config: JsonReader) -> Scheme:
    skipped = read_modules(config, "skip_modules")
    params = config.object("quant_config")
    if params is None:
        raise config.refuse("quant_config", "is required")
    if params.has("weight_quant_params"):
        return Scheme("hqq", ((None, _hqq_matrix(params)),), skipped)
    check_few(config, "quant_config", params)
    # Each kind of linear layer may have settings of its own.
    formats: list[tuple[Modules | None, MatrixFormat]] = []
    for tag in params.values:
        own = params.object(tag)
        if own is not None:
            formats.append((modules_of(params, tag, [tag]), _hqq_matrix(own)))
    if not formats:
        raise params.refuse("weight_quant_params", "is required")
    return Scheme("hqq", tuple(formats), skipped)


def _hqq_matrix(params: JsonReader) -> HqqMatrix:
    for key in ("scale_quant_params", "zero_quant_params"):
        if params.object(key) is not None:
            raise params.refuse(key, "quantised scales and zeros are not supported")
    weight = params.object("weight_quant_params")
    if weight is None:
        raise params.refuse("weight_quant_params", "is required")
    if weight.boolean("view_as_float", False):
        raise weight.refuse("view_as_float", "must be false")
    if not weight.boolean("channel_wise", True):
        raise weight.refuse("channel_wise", "must be true")
    group = weight.integer("group_size", 1, MOST_GROUP) if weight.has("group_size") else None
    return HqqMatrix(read_bits(weight, "nbits", _BITS), group, weight.integer("axis", 0, 1, 1))


#: Other names of these methods.
_ALIASES: Final = {
    "compressed_tensors": "compressed-tensors",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
}
_METHODS: Final[Mapping[str, Callable[[JsonReader], Scheme]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "hqq": _hqq,
    "modelopt": modelopt,
    "auto-round": auto_round,
}
