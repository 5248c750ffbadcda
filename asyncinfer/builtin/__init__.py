"""The small model shipped with the package, and the text it was trained on."""

from __future__ import annotations

from asyncinfer.builtin.corpus import read_corpus, standard_library
from asyncinfer.builtin.paths import DRAFT_PATH, EMBEDDED, MODEL_PATH

__all__ = ["DRAFT_PATH", "EMBEDDED", "MODEL_PATH", "read_corpus", "standard_library"]
