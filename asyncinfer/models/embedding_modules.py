"""`EmbeddingModules`: the modules that make a vector of hidden states, as the `modules.json` of a
checkpoint lists them, which sentence-transformers writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.errors import ModelLoadError, short_repr
from asyncinfer.files import checkpoint_file, plain_name, read_json
from asyncinfer.models.parts import MOST_WIDTH
from asyncinfer.models.reader import JsonReader
from asyncinfer.quantization import as_tensor
from asyncinfer.weights import (
    Packed,
    Piece,
    SafetensorsCheckpoint,
    WeightLoader,
    check_weights,
)

__all__ = ["DenseModule", "EmbeddingModules", "read_modules"]

_FILE: Final = "modules.json"
_MOST_BYTES: Final = 1 << 20
_MOST_MODULES: Final = 16
_MOST_PROMPTS: Final = 256
_MOST_PROMPT_CHARS: Final = 1 << 16
#: The pooling mode that is on, by the flags of a pooling's config or its `pooling_mode`.
_MODE: Final = "pooling_mode_"
_POOLINGS: Final[Mapping[str, Literal["last", "mean"]]] = {
    "lasttoken": "last",
    "mean_tokens": "mean",
    "mean": "mean",
}
_ACTIVATIONS: Final = ("torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh")


@dataclass(frozen=True, slots=True, eq=False)
class DenseModule:
    """A layer over pooled vectors."""

    #: float32 `[out, in]`.
    weight: npt.NDArray[np.float32]
    #: float32 `[out]`.
    bias: npt.NDArray[np.float32] | None
    tanh: bool

    def __call__(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """float32 `[texts, in]` to `[texts, out]`."""
        outputs = vectors @ self.weight.T
        if self.bias is not None:
            outputs += self.bias
        return np.tanh(outputs) if self.tanh else outputs


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingModules:
    """How an embedding model was trained to be used."""

    pooling: Literal["last", "mean"]
    dense: tuple[DenseModule, ...] = ()
    #: Whether vectors are normalised to length 1.
    normalize: bool = True
    #: Texts to put before an input, by name.
    prompts: Mapping[str, str] = field(default_factory=dict)
    #: The name of the prompt that inputs get by default.
    default_prompt: str | None = None


def read_modules(folder: Path, hidden_size: int) -> EmbeddingModules | None:
    """The modules of the checkpoint in `folder`; None where it lists none. Raises `ModelLoadError`,
    which names a module that this engine does not compute."""
    path = checkpoint_file(folder, _FILE)
    if path is None:
        return None
    kinds = _kinds(path)
    names = [kind for kind, _ in kinds]
    known = ["Transformer", "Pooling", *["Dense"] * names.count("Dense")]
    normalize = names[-1:] == ["Normalize"]
    if names != known + ["Normalize"] * normalize:
        bound = "must be Transformer, Pooling, any number of Dense, and Normalize or not"
        raise ModelLoadError(f"modules {', '.join(names)}: {bound}", file=str(path))
    if kinds[0][1]:
        raise ModelLoadError(f"path={kinds[0][1]!r} of Transformer: must be empty", file=str(path))
    _check_transformer(folder)
    pooling = _pooling(_config(folder, kinds[1]), hidden_size)
    dense: list[DenseModule] = []
    for kind in kinds[2 : len(known)]:
        inputs = dense[-1].weight.shape[0] if dense else hidden_size
        dense.append(_dense(folder, kind[1], _config(folder, kind), inputs))
    prompts, default = _prompts(folder)
    return EmbeddingModules(pooling, tuple(dense), normalize, prompts, default)


def _kinds(path: Path) -> list[tuple[str, str]]:
    """The kind of each module, and the folder of its files."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ModelLoadError(f"more than {_MOST_BYTES} bytes", file=str(path))
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot be read as JSON: {error}", file=str(path)) from error
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MOST_MODULES:
        raise ModelLoadError(f"must hold a list of 1 to {_MOST_MODULES} modules", file=str(path))
    kinds = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ModelLoadError(
                f"[{index}]={short_repr(entry)}: must be an object", file=str(path)
            )
        reader = JsonReader(entry, str(path), f"[{index}].")
        name = reader.string("type")
        if not name.startswith("sentence_transformers."):
            raise reader.refuse("type", "is code of the checkpoint, which is never run")
        kind = name.rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize"):
            raise reader.refuse("type", "must be Transformer, Pooling, Dense or Normalize")
        within = reader.string("path", "")
        if within and not plain_name(within):
            raise reader.refuse("path", "leads out of the checkpoint's folder")
        kinds.append((kind, within))
    return kinds


def _config(folder: Path, kind: tuple[str, str]) -> JsonReader:
    name, within = kind
    path = checkpoint_file(folder, "config.json", within)
    if path is None:
        raise ModelLoadError(f"{name} has no config.json", file=str(folder / within))
    return JsonReader(read_json(path, _MOST_BYTES), str(path))


def _check_transformer(folder: Path) -> None:
    path = checkpoint_file(folder, "sentence_bert_config.json")
    if path is not None:
        config = JsonReader(read_json(path, _MOST_BYTES), str(path))
        if config.boolean("do_lower_case", False):
            raise config.refuse("do_lower_case", "is not supported")


def _pooling(config: JsonReader, hidden_size: int) -> Literal["last", "mean"]:
    size = "word_embedding_dimension" if config.has("word_embedding_dimension") else ""
    if size and config.integer(size, 1, MOST_WIDTH) != hidden_size:
        raise config.refuse(size, f"must be the model's hidden_size={hidden_size}")
    if config.has("pooling_mode"):
        modes = [config.string("pooling_mode")]
        key = "pooling_mode"
    else:
        keys = [key for key in config.values if key.startswith(_MODE)]
        on = [key for key in keys if config.boolean(key, False)]
        modes = [key.removeprefix(_MODE) for key in on]
        key = on[0] if on else f"{_MODE}lasttoken"
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        why = "the pooling must be one: lasttoken or mean_tokens"
        raise config.refuse(key, f"{why}, not {' and '.join(modes) or 'none'}")
    pooling = _POOLINGS[modes[0]]
    if pooling == "mean" and not config.boolean("include_prompt", True):
        raise config.refuse("include_prompt", "a mean without the prompt's tokens is not supported")
    return pooling


def _dense(folder: Path, within: str, config: JsonReader, inputs: int) -> DenseModule:
    if config.integer("in_features", 1, MOST_WIDTH) != inputs:
        raise config.refuse("in_features", f"the vectors before it have {inputs}")
    outputs = config.integer("out_features", 1, MOST_WIDTH)
    activation = config.string("activation_function", _ACTIVATIONS[1])
    if activation not in _ACTIVATIONS:
        raise config.refuse("activation_function", f"must be one of {', '.join(_ACTIVATIONS)}")
    for key in ("module_input_name", "module_output_name"):
        if config.string(key, "sentence_embedding") != "sentence_embedding":
            raise config.refuse(key, "must be sentence_embedding")
    table = {"weight": Packed((Piece("linear.weight", (outputs, inputs)),))}
    if config.boolean("bias", True):
        table["bias"] = Packed((Piece("linear.bias", (outputs,)),))
    with SafetensorsCheckpoint(folder, within) as checkpoint:
        check_weights(checkpoint, table)
        loader = WeightLoader(checkpoint, table, torch.device("cpu"), torch.float32, None)
        arrays = {name: as_tensor(loader(name)).numpy() for name in table}
    tanh = activation == _ACTIVATIONS[1]
    return DenseModule(arrays["weight"], arrays.get("bias"), tanh)


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the default prompt."""
    path = checkpoint_file(folder, "config_sentence_transformers.json")
    if path is None:
        return {}, None
    config = JsonReader(read_json(path, _MOST_BYTES), str(path))
    given = config.object("prompts")
    values: Mapping[str, Any] = {} if given is None else given.values
    if len(values) > _MOST_PROMPTS:
        raise config.refuse("prompts", f"at most {_MOST_PROMPTS}")
    for name, text in values.items():
        if not isinstance(text, str) or len(text) > _MOST_PROMPT_CHARS:
            bound = f"must be a string of at most {_MOST_PROMPT_CHARS} characters"
            raise config.refuse("prompts", f"{name!r} {bound}")
    default = config.string("default_prompt_name", "") or None
    if default is not None and default not in values:
        raise config.refuse("default_prompt_name", "must name one of the prompts")
    return dict(values), default
