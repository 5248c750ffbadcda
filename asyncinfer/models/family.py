"""What sets one architecture apart from the shared decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture, as differences from the Llama-shaped decoder."""

    #: The name under `architectures` in `config.json`.
    architecture: str
    #: What a key that `config.json` leaves out stands for.
    defaults: Mapping[str, Any] = field(default_factory=dict)
