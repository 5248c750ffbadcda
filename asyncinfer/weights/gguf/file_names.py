"""Names of GGUF files: which one of several is meant, and the parts of a split model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from asyncinfer.errors import ModelLoadError

__all__ = ["find_gguf", "split_names"]

#: The name of one file of several: the model's name, the file's number, and how many there are.
_SPLIT: Final = re.compile(r"(.+)-(\d{5})(-of-)(\d{5})(\.gguf)", re.IGNORECASE)
#: How llama.cpp's converter begins the name of a file that turns images into a model's input.
_PROJECTOR: Final = "mmproj"
_MOST_PARTS: Final = 1000
_MOST_SHOWN: Final = 12


def split_names(name: str) -> list[str]:
    """The names of the files that a model was split into, of which `name` is the first; `name`
    alone if the model was not split. `ModelLoadError` if `name` is another part than the first."""
    match = _SPLIT.fullmatch(name)
    if match is None:
        return [name]
    stem, number, of, count, suffix = match[1], int(match[2]), match[3], int(match[4]), match[5]
    if number != 1 or not 1 <= count <= _MOST_PARTS:
        raise ModelLoadError(f"is file {number} of {count}: name the first of them", file=name)
    return [f"{stem}-{part:05}{of}{count:05}{suffix}" for part in range(1, count + 1)]


def find_gguf(names: Iterable[str], wanted: str, where: str) -> str:
    """The file called `wanted`, or else the only one with `wanted` in its name. Of a model that was
    split only the first part counts, and what reads images for one is no model. `ModelLoadError`
    lists the files."""
    first = [name for name in sorted(names) if not _is_later(name)]
    if wanted in first:
        return wanted
    first = [name for name in first if not name.rpartition("/")[2].startswith(_PROJECTOR)]
    found = [name for name in first if wanted.lower() in name.lower()]
    if len(found) == 1:
        return found[0]
    shown = ", ".join((found or first)[:_MOST_SHOWN]) or "none"
    which = f"named like {wanted!r}" if wanted else "of GGUF"
    count = "several files" if found else "no file"
    raise ModelLoadError(f"holds {count} {which}; name one of: {shown}", file=where)


def _is_later(name: str) -> bool:
    match = _SPLIT.fullmatch(name)
    return match is not None and int(match[2]) != 1
