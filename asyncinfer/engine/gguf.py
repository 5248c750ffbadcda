"""What an engine needs of a model in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncinfer.config import EngineConfig
from asyncinfer.engine.defaults import GenerationDefaults
from asyncinfer.engine.source import Loaded, Progress
from asyncinfer.errors import InvalidRequest, ModelLoadError
from asyncinfer.models.gguf import gguf_architecture
from asyncinfer.params import SamplingParams
from asyncinfer.runner import open_runner
from asyncinfer.text import gguf_template, gguf_tokenizer
from asyncinfer.weights.gguf import read_header

__all__ = ["load_gguf"]

#: Our options -> keys of a file, after `general.sampling.`.
_OPTIONS: Final = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def load_gguf(path: Path, config: EngineConfig, progress: Progress | None) -> Loaded:
    """Load the model in the GGUF file `path`. Raises `ModelLoadError`."""
    metadata = read_header(path).metadata
    # First of all, for what else there is in the file hangs on it.
    gguf_architecture(metadata, str(path))
    tokenizer = gguf_tokenizer(metadata, str(path))
    template = gguf_template(metadata, str(path), tokenizer.shield)
    defaults = _defaults(metadata, path)
    runner = open_runner(path, config, tokenizer.vocab_size, progress)
    notes = (*runner.notes, *template.notes)
    return Loaded(runner, tokenizer, template, defaults, notes)


def _defaults(metadata: Mapping[str, Any], path: Path) -> GenerationDefaults:
    """What the file says of sampling; a file that says nothing is of a greedy model, as a
    checkpoint without a `generation_config.json`."""
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _OPTIONS.items()}
    values = {name: value for name, value in found.items() if value is not None}
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        raise ModelLoadError(f"general.sampling: {error}", file=str(path)) from error
    return GenerationDefaults(not values, values)
