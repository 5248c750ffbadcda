"""What was found out about this machine before: files in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from platformdirs import user_cache_path

__all__ = ["forget", "keep", "kept_path", "read_kept", "write_whole"]

#: Bytes of a file; one of ours is far from it.
_MOST_BYTES: Final = 16_384


def kept_path(kind: str, key: Mapping[str, str], folder: Path | None = None) -> Path:
    """The file of a finding. `key` names everything that the finding depends on. `folder`: None
    takes the one of `kind` in the user's cache folder."""
    text = json.dumps(dict(key), sort_keys=True)
    place = folder or user_cache_path("asyncinfer") / kind
    return place / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_kept(path: Path, key: Mapping[str, str]) -> dict[str, Any] | None:
    """What `keep` wrote; None where there is nothing, or a file that it did not write."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            return None
        kept = json.loads(data)
        if not isinstance(kept, dict) or kept["key"] != key:
            return None
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    return kept


def keep(path: Path, key: Mapping[str, str], **found: object) -> None:
    """Write what was found. A folder that cannot be written to keeps nothing."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"key": dict(key), **found}, indent=1).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, also for a process that reads it at this
    moment. Only its owner may read it. Raises `OSError`."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def forget(path: Path) -> None:
    """Remove what was kept."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
