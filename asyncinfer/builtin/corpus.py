"""The training text: the Python standard library's own sources.

Which files are held out depends only on their names below the library's folder, so every run with
the same Python measures itself on the same files.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HELD_OUT_SHARE: Final = 0.03

# Tables of character codes and pydoc's help texts are data in Python files: many bytes that teach
# nothing about code.
_SKIPPED: Final = frozenset(
    {"__pycache__", "dist-packages", "encodings", "pydoc_data", "site-packages"}
)


@dataclass(frozen=True)
class Corpus:
    """The library's files, by relative name, as the model is trained and measured on them."""

    training: dict[str, str]
    held_out: dict[str, str]


def standard_library() -> Path:
    """The Lib folder of the running Python."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(name: str) -> bool:
    """Whether the file of this relative name (with forward slashes) is kept out of training."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def read_corpus(root: Path, *, package: str = "") -> Corpus:
    """Read every Python file below `root`, or those of one package, in the order of names.

    Files that do not parse are left out: the test suite has some that are broken on purpose.
    """
    training: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in sorted((root / package).rglob("*.py")):
        name = path.relative_to(root)
        if not _SKIPPED.isdisjoint(name.parts):
            continue
        text = _read(path)
        if text is None:
            continue
        (held_out if is_held_out(name.as_posix()) else training)[name.as_posix()] = text
    return Corpus(training, held_out)


def _read(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode("utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the test suite has invalid escapes in its sources
            ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    return text or None
