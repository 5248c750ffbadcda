"""`auto_map`: code that comes with a checkpoint, which is never read nor run. A checkpoint of a
known family is loaded without the code, and any other is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncinfer.errors import ModelLoadError, short_repr
from asyncinfer.files import checkpoint_file, read_json
from asyncinfer.models.reader import JsonReader
from asyncinfer.plugins.architecture import NEVER_RUN

__all__ = ["TIKTOKEN_FILES", "model_code", "tiktoken_file", "tokenizer_code"]

#: Tokenizer classes that are code, of Kimi and Hunyuan -> the file beside each, which can be read
#: without that code.
TIKTOKEN_FILES: Final = {"TikTokenTokenizer": "tiktoken.model", "HYTokenizer": "hy.tiktoken"}

_TOKENIZER_CONFIG = "tokenizer_config.json"
_MOST_BYTES = 64 << 20


def model_code(config: JsonReader, architecture: str, model_type: str | None) -> tuple[str, ...]:
    """A note about an `auto_map` that is set aside; empty without one. It is set aside if every
    name in `config.json` says that the model is `architecture`, whose family is for `model_type`;
    tensors and keys are checked as strictly as ever. Any other `auto_map` is refused."""
    code = config.values.get("auto_map")
    if not code:
        return ()
    if not isinstance(code, Mapping):
        raise config.refuse("auto_map", f"{NEVER_RUN}; must be an object")
    theirs = config.values.get("model_type")
    if model_type is None or theirs != model_type:
        raise config.refuse(
            "auto_map", f"{NEVER_RUN}; model_type={short_repr(theirs)} is of no family here"
        )
    others = [name for name in config.values["architectures"] if name != architecture]
    written = code.get("AutoModelForCausalLM")
    if written is not None and str(written).rpartition(".")[2] != architecture:
        others.append(written)
    if others:
        raise config.refuse(
            "auto_map", f"{NEVER_RUN}; {short_repr(others[0])} is not {architecture}"
        )
    return (
        f"auto_map is set aside, code that comes with a checkpoint is never run: {architecture} "
        "is the engine's own",
    )


def tokenizer_code(folder: Path) -> tuple[str, ...]:
    """`model_code` for the folder's tokenizer. The code is ignored if there is a fast tokenizer,
    which `tokenizer.json` describes completely, or a file that can be read without the code. Raises
    `ModelLoadError` if there is neither."""
    code, written, file = _tokenizer_class(folder)
    if not written:
        return ()
    match written:
        case [_, str()]:
            known = "tokenizer.json says it all"
        case _:
            found = tiktoken_file(folder)
            if found is None:
                raise ModelLoadError(
                    f"auto_map={short_repr(code)}: {NEVER_RUN}; it has no fast tokenizer, which "
                    "would be all in tokenizer.json",
                    file=file,
                )
            known = f"{found.name} is read without it"
    return (
        "the tokenizer's auto_map is set aside, code that comes with a checkpoint is never run: "
        f"{known}",
    )


def tiktoken_file(folder: Path) -> Path | None:
    """The file of a tokenizer whose class is in `TIKTOKEN_FILES`; None for other classes."""
    _, written, _ = _tokenizer_class(folder)
    match written:
        case [str(name), None] | str(name):
            file = TIKTOKEN_FILES.get(name.rpartition(".")[2])
            return None if file is None else checkpoint_file(folder, file)
    return None


def _tokenizer_class(folder: Path) -> tuple[object, object, str]:
    """The `auto_map` of the folder's tokenizer, the class that it names, and that file."""
    path = checkpoint_file(folder, _TOKENIZER_CONFIG)
    values: dict[str, Any] = {} if path is None else read_json(path, _MOST_BYTES)
    code = values.get("auto_map")
    written = code.get("AutoTokenizer") if isinstance(code, dict) else code
    return code, written, str(path)
