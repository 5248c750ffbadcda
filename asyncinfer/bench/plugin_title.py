"""The title of a plugin in tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["plugin_title"]


def plugin_title(chosen: str | tuple[str, Mapping[str, Any]]) -> str:
    """A name, or `NAME:ARGUMENT=VALUE,...` as the command line takes it."""
    name, args = (chosen, {}) if isinstance(chosen, str) else chosen
    written = (f"{key}={json.dumps(value)}" for key, value in args.items())
    return f"{name}:{','.join(written)}" if args else name
