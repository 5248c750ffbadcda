"""Where the shipped models live; importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

EMBEDDED: Final = "embedded"
"""What names the shipped models, in the place of a path."""

_FOLDER: Final = Path(__file__).resolve().parent

MODEL_PATH: Final[Path] = _FOLDER / "model"
"""The shipped model's folder, laid out as the hub lays out a checkpoint."""

DRAFT_PATH: Final[Path] = _FOLDER / "draft"
"""The draft model's folder: the same tokenizer, about a fifth of the parameters."""
