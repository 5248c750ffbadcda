"""`examine`: whether a checkpoint can be loaded, and if not, why. Reads headers only."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncinfer.errors import ModelLoadError, PluginError
from asyncinfer.files import following_links, read_config_file, read_config_json
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.config_file import parse_config
from asyncinfer.models.gguf import gguf_config
from asyncinfer.models.leftovers import ignored_tensor
from asyncinfer.models.remote_code import tokenizer_code
from asyncinfer.models.suited import suited
from asyncinfer.models.tensors import tensor_table
from asyncinfer.plugins import models
from asyncinfer.weights import (
    SafetensorsCheckpoint,
    alike,
    check_weights,
)
from asyncinfer.weights.gguf import GgufCheckpoint, is_gguf
from asyncinfer.weights.tensor_files import StoredTensor

__all__ = ["Examined", "examine"]

#: Groups of tensors that a message names.
_NAMED = 4
#: A checkpoint of more tensors is compared by its first layers alone, which have every kind of
#: layer: comparing 59,000 tensors with one family takes 10 s.
MANY_TENSORS = 4096
FIRST_LAYERS = 8


@dataclass(frozen=True, slots=True)
class Examined:
    """What `examine` found."""

    #: The names under `architectures` in `config.json`.
    architectures: tuple[str, ...]
    #: The shape of the decoder; None if the checkpoint cannot be loaded.
    config: ModelConfig | None
    #: Numbers in the weights.
    parameters: int
    #: Why it cannot be loaded; empty if it can.
    problems: tuple[str, ...]
    #: Remarks about how it is loaded, such as code that is not run.
    notes: tuple[str, ...] = ()


def examine(folder: str | Path, *, follow_symlinks: bool = False) -> Examined:
    """Examine the checkpoint in `folder`, a GGUF file, or a `config.json` alone. A folder of an
    unknown architecture is compared with every family, and the problems say how its tensors differ
    from those of the nearest. `follow_symlinks` is as in `EngineConfig`.

    Raises `ModelLoadError` where there is no `config.json`, or no weights, that can be read.
    """
    path = Path(folder)
    if is_gguf(path):
        return _examine_gguf(path)
    if os.path.isfile(path):
        return _examine_config(path)
    with following_links(follow_symlinks):
        return _examine_folder(path)


def _examine_folder(path: Path) -> Examined:
    values, file = read_config_json(path)
    names = _names(values)
    problems: list[str] = []
    known = bool(set(names) & set(models.names()))
    try:
        config = parse_config(values, file=file)
    except (ModelLoadError, PluginError) as error:
        problems = [str(error)]
    try:
        checkpoint = SafetensorsCheckpoint(path)
    except ModelLoadError as error:
        if not problems:
            raise
        return Examined(names, None, 0, (*problems, str(error)))
    with checkpoint:
        parameters = sum(math.prod(stored.shape) for stored in checkpoint.tensors.values())
        if problems:
            nearest = [] if known else _nearest(values, checkpoint)
            return Examined(names, None, parameters, (*problems, *nearest))
        try:
            config = suited(config, checkpoint)
            table = tensor_table(config)
            ignored = partial(ignored_tensor, config=config)
            if check_weights(checkpoint, table, ignored, config.scheme):
                # The stored tensors are packed numbers and their scales.
                parameters = _parameters(config)
            notes = (*config.notes, *tokenizer_code(path))
        except (ModelLoadError, PluginError) as error:
            return Examined(names, None, parameters, (str(error),))
    return Examined(names, config, parameters, (), notes)


def _examine_gguf(path: Path) -> Examined:
    with GgufCheckpoint(path) as checkpoint:
        parameters = sum(math.prod(stored.shape) for stored in checkpoint.tensors.values())
        named = str(checkpoint.metadata.get("general.architecture"))
        try:
            config = gguf_config(checkpoint)
            check_weights(checkpoint, tensor_table(config), partial(ignored_tensor, config=config))
        except (ModelLoadError, PluginError) as error:
            return Examined((named,), None, parameters, (str(error),))
        return Examined((config.architecture,), config, parameters, (), config.notes)


def _examine_config(path: Path) -> Examined:
    try:
        values = read_config_file(path)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{error}; wanted is a folder, a GGUF file or a config.json"
        ) from error
    try:
        config = parse_config(values, file=str(path))
    except (ModelLoadError, PluginError) as error:
        return Examined(_names(values), None, 0, (str(error),))
    notes = (*config.notes, "its weights were not looked at, only its config")
    return Examined(_names(values), config, _parameters(config), (), notes)


def _parameters(config: ModelConfig) -> int:
    """Numbers in the tensors of the model."""
    pieces = (piece for packed in tensor_table(config).values() for piece in packed.pieces)
    return sum(math.prod(piece.shape) for piece in pieces)


def _names(values: dict[str, Any]) -> tuple[str, ...]:
    given = values.get("architectures")
    return tuple(map(str, given)) if isinstance(given, list) else ()


def _nearest(values: dict[str, Any], checkpoint: SafetensorsCheckpoint) -> list[str]:
    """How the checkpoint's tensors differ from those of the nearest family."""
    best: tuple[int, list[str]] | None = None
    nearest, broken = "", []
    # Rotations and code have no tensors, and a family could refuse these keys.
    dropped = re.compile("rope|partial_ro|auto_map")
    values = {key: value for key, value in values.items() if not dropped.match(key)}
    there = checkpoint.tensors
    whole = values
    if len(there) > MANY_TENSORS:
        values = _first_layers(values)
        # No layer's number has ten digits, and Python parses no integer of thousands of digits.
        numbered = {name: re.search(r"\.(\d{1,9})\.", name) for name in there}
        there = {
            name: there[name]
            for name, layer in numbered.items()
            if layer is None or int(layer[1]) < FIRST_LAYERS
        }
    # Llama first, so that it wins a tie: many families have the same tensors.
    for name in sorted(models.names(), key=lambda name: (name != "LlamaForCausalLM", name)):
        try:
            config = parse_config({**values, "architectures": [name]})
        except ModelLoadError:
            continue
        except PluginError as error:
            # Reported, since the broken plugin may be the family that is needed.
            broken.append(f"not compared: {error}")
            continue
        found = _compare(name, suited(config, checkpoint), there)
        if best is None or found[0] < best[0]:
            best, nearest = found, name
    if best is not None and values is not whole:
        with suppress(ModelLoadError):
            config = parse_config({**whole, "architectures": [nearest]})
            best = _compare(nearest, suited(config, checkpoint), checkpoint.tensors)
    return [*(best[1] if best else ()), *broken]


def _first_layers(values: dict[str, Any]) -> dict[str, Any]:
    """The config of a model that has the first layers alone."""
    count = values.get("num_hidden_layers")
    if not isinstance(count, int) or count <= FIRST_LAYERS:
        return values
    shorter = {
        key: value[:FIRST_LAYERS]
        for key, value in values.items()
        if isinstance(value, list | str) and len(value) == count
    }
    return {**values, **shorter, "num_hidden_layers": FIRST_LAYERS}


def _compare(
    name: str, config: ModelConfig, there: Mapping[str, StoredTensor]
) -> tuple[int, list[str]]:
    """How many tensors differ from those of the family called `name`, and lines that list them."""
    wanted = {p.name: p.shape for packed in tensor_table(config).values() for p in packed.pieces}
    left_over = [n for n in there if n not in wanted and not ignored_tensor(n, config)]
    missing = [n for n in wanted if n not in there]
    reshaped = [n for n, shape in wanted.items() if n in there and not alike(there[n].shape, shape)]
    lines = [f"the nearest family is {name}; beside its tensors the checkpoint"]
    for what, tensors in (
        ("has", left_over),
        ("lacks", missing),
        ("has in other shapes", reshaped),
    ):
        if tensors:
            lines.append(f"  {what}: {_summary(tensors)}")
    if len(lines) == 1:
        lines = [f"its tensors are those of {name}: what it computes may still differ"]
    return len(left_over) + len(missing) + len(reshaped), lines


def _summary(names: Iterable[str]) -> str:
    """The tensors' names for a message, those of all layers as one."""
    groups = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))
    more = len(groups) - _NAMED
    return ", ".join(groups[:_NAMED]) + (f" and {more} more" if more > 0 else "")
