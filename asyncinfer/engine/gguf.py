"""What an engine needs of a model in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from asyncinfer.config import EngineConfig
from asyncinfer.engine.defaults import GenerationDefaults
from asyncinfer.engine.source import Loaded, Progress
from asyncinfer.errors import InvalidRequest, ModelLoadError, short_repr
from asyncinfer.models.embedding_modules import EmbeddingModules
from asyncinfer.models.gguf import gguf_architecture
from asyncinfer.params import SamplingParams
from asyncinfer.runner import open_runner
from asyncinfer.text import gguf_template, gguf_tokenizer
from asyncinfer.weights.gguf import read_header

__all__ = ["load_gguf"]

#: The numbers by which a file names how the vectors of tokens become one; None: it does not say.
_POOLINGS: Final[Mapping[int, Literal["last", "mean"] | None]] = {
    **dict.fromkeys((-1, 0, (1 << 32) - 1)),
    1: "mean",
    3: "last",
}
#: Our options -> keys of a file, after `general.sampling.`.
_OPTIONS: Final = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def load_gguf(
    path: Path,
    config: EngineConfig,
    progress: Progress | None,
    *,
    draft: bool = False,
    head: Path | None = None,
) -> Loaded:
    """Load the model in the GGUF file `path`. Raises `ModelLoadError`."""
    # Held until the weights are loaded, so that the header is read once.
    header = read_header(path)
    metadata = header.metadata
    # First, since all other keys depend on the architecture.
    gguf_architecture(metadata, str(path))
    pooling, unknown = _pooling(metadata)
    modules = None if pooling is None else EmbeddingModules(pooling)
    tokenizer = gguf_tokenizer(metadata, str(path))
    template = gguf_template(metadata, str(path), tokenizer.shield)
    defaults = _defaults(metadata, path)
    runner = open_runner(path, config, tokenizer.vocab_size, progress, draft=draft, head=head)
    notes = (*runner.notes, *template.notes, *unknown)
    return Loaded(
        runner, tokenizer, template, defaults, notes, runner.architecture, runner.dtype, modules
    )


def _pooling(metadata: Mapping[str, Any]) -> tuple[Literal["last", "mean"] | None, Sequence[str]]:
    """How the file's model makes an embedding of the vectors of tokens; None where it does not say.
    With notes where it says so in a way that is not known, which matters to embeddings alone."""
    key = f"{metadata['general.architecture']}.pooling_type"
    kind = metadata.get(key, 0)
    if type(kind) is int and kind in _POOLINGS:
        return _POOLINGS[kind], ()
    known = "1 (mean) and 3 (last) are known; an embedding is the last token's vector"
    return None, [f"{key}={short_repr(kind)}: {known}"]


def _defaults(metadata: Mapping[str, Any], path: Path) -> GenerationDefaults:
    """The file's sampling defaults; a file without any is sampled like a checkpoint without a
    `generation_config.json`."""
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _OPTIONS.items()}
    values = {name: value for name, value in found.items() if value is not None}
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        raise ModelLoadError(f"general.sampling: {error}", file=str(path)) from error
    return GenerationDefaults(not values, values)
