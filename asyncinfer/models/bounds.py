"""Bounds of a decoder's sizes."""

from __future__ import annotations

from typing import Final

__all__ = [
    "MOST_CONTEXT",
    "MOST_HEADS",
    "MOST_HEAD_DIM",
    "MOST_LAYERS",
    "MOST_VOCAB",
    "MOST_WIDTH",
]

# Far above any known model: a larger value is a mistake or an attack.
MOST_WIDTH: Final = 1 << 20
MOST_VOCAB: Final = 1 << 24
MOST_LAYERS: Final = 1 << 10
MOST_HEADS: Final = 1 << 12
MOST_HEAD_DIM: Final = 1 << 10
MOST_CONTEXT: Final = 2**31 - 1
