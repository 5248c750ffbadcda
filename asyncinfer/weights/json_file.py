"""A checkpoint's JSON files, read with suspicion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncinfer.errors import ModelLoadError

__all__ = ["read_json"]


def read_json(path: Path, most_bytes: int) -> dict[str, Any]:
    """The JSON object in `path`, which may hold no key twice and no more than `most_bytes`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ModelLoadError(f"key {twice!r} occurs twice", file=str(path))
        return values

    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise ModelLoadError(f"{size} bytes, more than {most_bytes}", file=str(path))
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot be read as JSON: {error}", file=str(path)) from error
    if not isinstance(values, dict):
        raise ModelLoadError("must hold a JSON object", file=str(path))
    return values
