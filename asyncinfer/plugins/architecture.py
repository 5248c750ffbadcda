"""`find_architecture` finds the family that a `config.json` names, without importing any family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

from asyncinfer.errors import ModelLoadError, short_repr
from asyncinfer.plugins.groups import models

__all__ = ["NEVER_RUN", "find_architecture", "near"]

NEVER_RUN: Final = "names code that comes with the checkpoint, which is never run"
#: The endings of architectures' names, besides `Model` for checkpoints without a head.
_HEADS: Final = ("ForCausalLM", "LMHeadModel")
_ENDS: Final = (*_HEADS, "ForConditionalGeneration", "TextModel", "Model")
_NEAREST: Final = 3
#: The most names that are compared with all known names: a config may list a million.
_COMPARED: Final = 8


def find_architecture(values: Mapping[str, Any], file: str) -> str:
    """The first of the `architectures` in `values` that a family is registered for. Raises
    `ModelLoadError`, which suggests similar names."""
    names = values.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        shown = short_repr(names) if "architectures" in values else "(missing)"
        raise ModelLoadError(f"architectures={shown}: must be a list of names", file=file)
    known = models.names()
    for name in names:
        if name in known:
            return str(name)
        # A model that was saved without its head has such a name.
        stems = [name.removesuffix(end) for end in ("Model", "TextModel") if name.endswith(end)]
        for stem in stems:
            for head in _HEADS:
                if f"{stem}{head}" in known:
                    return f"{stem}{head}"
    more = ""
    if values.get("auto_map"):
        more += f"; its auto_map {NEVER_RUN}"
    if values.get("text_config"):
        more += "; it has a text_config, so that it is a model of more than text"
    raise ModelLoadError(
        f"architectures={short_repr(names)}: none of these is known{more}{near(names, known)}; "
        "'asyncinfer models' lists those that are, and a package may add one "
        "(docs/adding-a-model.md)",
        file=file,
    )


def near(names: Iterable[str], known: Iterable[str]) -> str:
    """Words for a message: the `known` names that are similar to `names`; empty if none is."""
    stems: dict[str, str] = {}
    for one in known:
        stems.setdefault(_stem(one), one)
    compared = map(_stem, islice(names, _COMPARED))
    found = [stem for name in compared for stem in get_close_matches(name, stems, _NEAREST)]
    nearest = [stems[stem] for stem in dict.fromkeys(found)][:_NEAREST]
    return f"; nearest by name: {', '.join(nearest)}" if nearest else ""


def _stem(name: str) -> str:
    ends = [end for end in _ENDS if name.endswith(end)]
    return name.removesuffix(ends[0] if ends else "").lower()
