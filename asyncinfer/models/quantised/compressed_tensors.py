"""compressed-tensors: groups of modules, each with a format of its own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Final

from asyncinfer.models.quantised.keys import (
    MOST_GROUP,
    check_few,
    check_known,
    modules_of,
    read_bits,
    read_modules,
    read_names,
)
from asyncinfer.models.reader import JsonReader
from asyncinfer.quantization.schemes import (
    Fp4Matrix,
    Fp8Matrix,
    IntMatrix,
    MatrixFormat,
    Modules,
    Scheme,
)

__all__ = ["compressed_tensors"]

_FLOAT8: Final = ("float-quantized", "naive-quantized")
#: 8-bit floats, 32 of which share a power of two.
_MXFP8: Final = "mxfp8-quantized"
_BYTES: Final = ("int-quantized", "naive-quantized")
#: Formats of 4-bit floats, and how many inputs share a scale.
_FLOAT4: Final = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
_FORMATS: Final = (*_FLOAT8, _MXFP8, "int-quantized", "pack-quantized", *_FLOAT4)
_STRATEGIES: Final = ("tensor", "channel", "group", "block", "tensor_group")
#: The target that names all linear layers by their class.
_ALL: Final = "Linear"
_EXPRESSION: Final = "re:"


def compressed_tensors(config: JsonReader) -> Scheme:
    """The scheme of a `quantization_config` whose method is compressed-tensors."""
    # Weights that were not compressed have left over their scales, which names them.
    check_known(config, "quantization_status", ("compressed", "frozen"))
    sparsity = config.object("sparsity_config")
    if sparsity is not None:
        check_known(sparsity, "format", ("dense",))
    transforms = config.object("transform_config")
    if transforms is not None and transforms.values.get("config_groups"):
        raise config.refuse("transform_config", "transforms of weights are not supported")
    groups = config.object("config_groups")
    if groups is None:
        raise config.refuse("config_groups", "is required")
    check_few(config, "config_groups", groups)
    targets: dict[str, MatrixFormat] = {}
    for name in groups.values:
        group = groups.object(name)
        # A group may be of activations only.
        weights = None if group is None else group.object("weights")
        if group is None or weights is None:
            continue
        format = _format(config, group, weights)
        if format is not None:
            # A group without targets is of no module, but it may be the only one.
            targets |= dict.fromkeys(_targets(group) or [""], format)
    if not targets:
        raise config.refuse("config_groups", "none of them quantises weights")
    formats = _by_precedence(config, targets)
    if len(set(targets.values())) == 1:
        # The targets may use another implementation's names; the tensors say what is quantised.
        formats.append((None, formats[0][1]))
    return Scheme("compressed-tensors", tuple(formats), read_modules(config, "ignore"))


def _targets(group: JsonReader) -> list[str]:
    names = read_names(group, "targets")
    # Raises for an expression that is no good, and names the group.
    modules_of(group, "targets", names)
    return names


def _by_precedence(
    config: JsonReader, targets: Mapping[str, MatrixFormat]
) -> list[tuple[Modules | None, MatrixFormat]]:
    """The formats in the order in which compressed-tensors looks for a module's: by its name, by
    expressions in their alphabetical order, and by its class, whichever group comes first."""
    # All expressions together are as many as one list may have.
    modules_of(config, "config_groups", targets)
    named: dict[MatrixFormat, list[str]] = {}
    for target, format in targets.items():
        if target != _ALL and not target.startswith(_EXPRESSION):
            named.setdefault(format, []).append(target)
    runs = list(named.items())
    expressions = sorted(target for target in targets if target.startswith(_EXPRESSION))
    runs += ((format, list(run)) for format, run in groupby(expressions, targets.__getitem__))
    found: list[tuple[Modules | None, MatrixFormat]] = [
        (modules_of(config, "config_groups", names), format) for format, names in runs
    ]
    if _ALL in targets:
        found.append((None, targets[_ALL]))
    return found


def _format(config: JsonReader, group: JsonReader, weights: JsonReader) -> MatrixFormat | None:
    """The format of a group's matrices; None where they are stored plain."""
    own = group.string("format", config.string("format", ""))
    holder = group if group.has("format") else config
    if own == "dense":
        return None
    if own not in _FORMATS:
        raise holder.refuse("format", f"is not supported; must be one of {', '.join(_FORMATS)}")
    bits, kind = weights.integer("num_bits", 1, 32, 8), weights.string("type", "int")
    fits = {
        "float": (bits == 8 and own in (*_FLOAT8, _MXFP8)) or (bits == 4 and own in _FLOAT4),
        "int": own in _BYTES or own == "pack-quantized",
    }
    if not fits.get(kind, False):
        raise weights.refuse("type", f"cannot have num_bits={bits} in the format {own}")
    if kind == "int":
        return _integers(weights, own)
    if not weights.boolean("symmetric", True):
        raise weights.refuse("symmetric", "must be true for floats")
    if own in _FLOAT4:
        size = _group_size(weights, _FLOAT4[own])
        return Fp4Matrix(size, scale_of_all=".weight_global_scale" if own[0] == "n" else None)
    if own == _MXFP8:
        return Fp8Matrix((1, _group_size(weights, 32)))
    return Fp8Matrix(_block(weights) if _strategy(weights) == "block" else None)


def _integers(weights: JsonReader, format: str) -> IntMatrix:
    packed = format == "pack-quantized"
    strategy = _strategy(weights)
    if strategy not in ("tensor", "channel", "group"):
        raise weights.refuse("strategy", "must be tensor, channel or group for integers")
    # Older checkpoints write True for "group".
    order = weights.values.get("actorder")
    if order not in (None, False, True, "static", "weight", "dynamic", "group"):
        raise weights.refuse("actorder", "must be static, weight, dynamic or group")
    return IntMatrix(
        bits=read_bits(weights, "num_bits", (2, 4, 8) if packed else tuple(range(2, 9))),
        group=_group_size(weights, None) if strategy == "group" else None,
        whole=strategy == "tensor",
        symmetric=weights.boolean("symmetric", True),
        reordered=order in (True, "dynamic", "group"),
        packed=packed,
    )


def _strategy(weights: JsonReader) -> str:
    """The scope of a scale; where none is named it follows from the group's size."""
    size = weights.values.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    check_known(weights, "strategy", _STRATEGIES)
    return weights.string("strategy", default)


def _group_size(weights: JsonReader, default: int | None) -> int:
    if default is not None:
        return weights.integer("group_size", 1, MOST_GROUP, default)
    return weights.integer("group_size", 1, MOST_GROUP)


def _block(weights: JsonReader) -> tuple[int, int]:
    outputs, inputs = weights.integers("block_structure", 2, 1, MOST_GROUP)
    return outputs, inputs
