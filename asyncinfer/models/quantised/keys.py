"""Reading keys that the parts of a `quantization_config` have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from asyncinfer.models.reader import JsonReader
from asyncinfer.quantization.schemes import Modules

__all__ = [
    "check_few",
    "check_known",
    "modules_of",
    "read_bits",
    "read_group",
    "read_modules",
    "read_names",
]

MOST_GROUP: Final = 1 << 20
#: The most groups of modules with formats of their own: every module is matched with each.
_MOST_FORMATS: Final = 1024
#: Names in one list: several times as many as any model has modules.
_MOST_NAMES: Final = 1 << 17


def check_few(config: JsonReader, key: str, parts: JsonReader | None) -> None:
    """Refuse an object under `key` with more than 1,024 formats. Raises `ModelLoadError`."""
    if parts is not None and len(parts.values) > _MOST_FORMATS:
        raise config.refuse(key, f"{len(parts.values)} entries, more than {_MOST_FORMATS}")


def check_known(config: JsonReader, key: str, known: tuple[str, ...]) -> None:
    """Refuse a value that is not one of `known`; the key may be missing. Raises
    `ModelLoadError`."""
    if config.has(key) and config.string(key) not in known:
        raise config.refuse(key, f"is not supported; must be one of {', '.join(known)}")


def read_group(config: JsonReader, key: str, default: int) -> int | None:
    """How many inputs share a scale; -1 stands for all, which is None."""
    group = config.integer(key, -1, MOST_GROUP, default)
    if group == 0:
        raise config.refuse(key, f"must be -1 or between 1 and {MOST_GROUP}")
    return None if group == -1 else group


def read_bits(config: JsonReader, key: str, known: tuple[int, ...]) -> int:
    """Bits of a number, one of `known`."""
    bits = config.integer(key, 1, 32)
    if bits not in known:
        raise config.refuse(key, f"is not supported; must be one of {', '.join(map(str, known))}")
    return bits


def read_names(config: JsonReader, *keys: str) -> list[str]:
    """The names in the lists under `keys`; none where a key is missing or null."""
    names: list[str] = []
    for key in keys:
        value = config.values.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise config.refuse(key, "must be a list of names")
        if len(value) > _MOST_NAMES:
            raise config.refuse(key, f"{len(value)} names, more than {_MOST_NAMES}")
        names += value
    return names


def read_modules(config: JsonReader, *keys: str) -> Modules:
    """The modules in the lists under `keys`."""
    return modules_of(config, keys[0], read_names(config, *keys))


def modules_of(config: JsonReader, key: str, names: Iterable[str]) -> Modules:
    """The modules of `names`, which are from `key`."""
    try:
        return Modules.of(names)
    except ValueError as error:
        raise config.refuse(key, str(error)) from None
