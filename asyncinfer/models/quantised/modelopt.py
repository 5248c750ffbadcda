"""NVIDIA's Model Optimizer: FP8 and NVFP4, for all modules or for each one."""

from __future__ import annotations

from typing import Final

from asyncinfer.models.quantised.keys import MOST_GROUP, check_known, modules_of, read_modules
from asyncinfer.models.reader import JsonReader
from asyncinfer.quantization.schemes import Fp4Matrix, Fp8Matrix, MatrixFormat, Modules, Scheme

__all__ = ["modelopt"]

_FP8: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_NVFP4: Final = ("NVFP4", "W4A16_NVFP4")
_MIXED: Final = "MIXED_PRECISION"


def modelopt(config: JsonReader) -> Scheme:
    """The scheme of a `quantization_config` whose method is modelopt."""
    skipped = read_modules(config, "exclude_modules", "ignore")
    layers = config.object("quantized_layers")
    if config.values.get("quant_algo") != _MIXED or layers is None:
        return Scheme("modelopt", ((None, _format(config)),), skipped)
    formats: dict[MatrixFormat, list[str]] = {}
    for name in layers.values:
        own = layers.object(name)
        if own is not None:
            formats.setdefault(_format(own), []).append(name)
    found: list[tuple[Modules | None, MatrixFormat]] = [
        (modules_of(config, "quantized_layers", names), format) for format, names in formats.items()
    ]
    return Scheme("modelopt", tuple(found), skipped)


def _format(config: JsonReader) -> MatrixFormat:
    check_known(config, "quant_algo", (*_FP8, *_NVFP4))
    if config.string("quant_algo") in _FP8:
        return Fp8Matrix()
    group = config.integer("group_size", 1, MOST_GROUP, 16)
    return Fp4Matrix(group, ".weight", ".weight_scale_2")
