"""AutoRound (Intel): matrices in the layouts of GPTQ and AWQ, with settings of single modules."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Final

from asyncinfer.models.quantised.keys import check_known, modules_of, read_bits, read_group
from asyncinfer.models.reader import JsonReader
from asyncinfer.quantization.schemes import AwqMatrix, GptqMatrix, MatrixFormat, Modules, Scheme

__all__ = ["auto_round"]

#: `packing_format` -> whether zero points are stored as they are, as in GPTQ's second version.
_GPTQ: Final = {
    "auto_round:auto_gptq": False,
    "auto_gptq": False,
    "auto_round": True,
    "auto_round:gptqmodel": True,
}
_AWQ: Final = ("auto_round:auto_awq", "auto_awq")
#: Bits of modules that are not quantised.
_PLAIN: Final = (16, 32)
_EXPRESSION: Final = re.compile(r"[*+?()\[\]{}|^$\\]")


def auto_round(config: JsonReader) -> Scheme:
    """The scheme of a `quantization_config` whose method is auto-round."""
    check_known(config, "packing_format", (*_GPTQ, *_AWQ))
    extra = config.object("extra_config")
    # Most of thousands of modules have the same settings.
    named: dict[MatrixFormat | None, list[str]] = {}
    matched: list[tuple[MatrixFormat | None, str]] = []
    for name in extra.values if extra is not None else ():
        assert extra is not None
        own = extra.object(name)
        if own is not None:
            format = _format(own.replaced({**config.values, **own.values}))
            if _EXPRESSION.search(name):
                matched.append((format, _searched(name)))
            else:
                named.setdefault(format, []).append(name)
    # A module's own settings come first, and then those of the first expression that has it.
    runs = list(named.items())
    runs += (
        (format, [pattern for _, pattern in run])
        for format, run in groupby(matched, key=lambda entry: entry[0])
    )
    skipped = [name for format, names in runs if format is None for name in names]
    found: list[tuple[Modules | None, MatrixFormat]] = [
        (modules_of(config, "extra_config", names), format)
        for format, names in runs
        if format is not None
    ]
    default = _format(config)
    if default is None:
        raise config.refuse("bits", "must be below 16")
    modules = modules_of(config, "extra_config", skipped)
    return Scheme("auto-round", (*found, (None, default)), modules)


def _searched(expression: str) -> str:
    """Has `Modules` look for an expression anywhere in a module's name."""
    whole = expression.startswith((".*", "^"))
    return f"re:{expression}" if whole else f"re:.*(?:{expression})"


def _format(config: JsonReader) -> MatrixFormat | None:
    """The format of matrices with these settings; None where they are plain."""
    if config.values.get("bits") in _PLAIN:
        return None
    check_known(config, "data_type", ("int",))
    packing = config.string("packing_format", "auto_round:auto_gptq")
    group = read_group(config, "group_size", 128)
    if packing in _AWQ:
        return AwqMatrix(bits=read_bits(config, "bits", (4, 8)), group=group)
    bits = read_bits(config, "bits", (2, 4, 8))
    return GptqMatrix(bits=bits, group=group, second_version=_GPTQ[packing])
