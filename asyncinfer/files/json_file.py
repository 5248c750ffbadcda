"""Reading a checkpoint's JSON files, which may be hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncinfer.errors import ModelLoadError

__all__ = ["KeyTwice", "read_json", "unique_keys"]


class KeyTwice(ValueError):
    """An object has a key twice."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"key {key!r} occurs twice")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's pairs as a dict, for the `object_pairs_hook` of `json`; raises `KeyTwice`."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise KeyTwice(key)
        values[key] = value
    return values


def read_json(path: Path, most_bytes: int) -> dict[str, Any]:
    """The JSON object in `path`, which may hold no key twice and no more than `most_bytes`."""
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise ModelLoadError(f"{size} bytes, more than {most_bytes}", file=str(path))
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except KeyTwice as twice:
        raise ModelLoadError(str(twice), file=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot be read as JSON: {error}", file=str(path)) from error
    if not isinstance(values, dict):
        raise ModelLoadError("must hold a JSON object", file=str(path))
    return values
