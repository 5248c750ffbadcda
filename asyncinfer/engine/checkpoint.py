"""`CheckpointSource`: a model from a checkpoint."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from asyncinfer.config import EngineConfig
from asyncinfer.engine.defaults import generation_defaults
from asyncinfer.engine.drafting_head import drafting_head
from asyncinfer.engine.source import Loaded, Progress
from asyncinfer.errors import ModelLoadError
from asyncinfer.files import CONFIG_JSON, following_links, read_config_json
from asyncinfer.plugins.architecture import find_architecture
from asyncinfer.text import ChatTemplate, Tokenizer
from asyncinfer.tools import response_notes

__all__ = ["CheckpointSource"]


class CheckpointSource:
    """A checkpoint: a local folder or GGUF file, a hub id, or the name of a model we know.

    Args:
        draft: it drafts for another model.
    """

    def __init__(self, model: str | Path, *, draft: bool = False) -> None:
        self.model = model
        self.draft = draft

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        self._check_architecture(config)
        # Imported here: engines on other model sources need no torch, and neither does a refusal.
        from asyncinfer.engine.gguf import load_gguf
        from asyncinfer.models import read_config
        from asyncinfer.models.embedding_modules import read_modules
        from asyncinfer.models.remote_code import tokenizer_code
        from asyncinfer.weights.gguf import is_gguf

        # Before the model, which is larger: what it is refused for would come after hours.
        head = drafting_head(config)
        path = self._path(config, _check_fetched)
        if is_gguf(path):
            return load_gguf(path, config, progress, draft=self.draft, head=head)
        with following_links(self._follows_links(config)):
            known = read_config(path)
            # Imported last, so that a refused config imports no runner.
            from asyncinfer.runner import open_runner

            tokenizer = Tokenizer.from_folder(path, known.vocab_size)
            template = ChatTemplate.from_folder(path, tokenizer.shield)
            defaults = generation_defaults(path)
            modules = read_modules(path, known.hidden_size)
            runner = open_runner(
                path, config, tokenizer.vocab_size, progress, draft=self.draft, head=head
            )
            notes = (
                *(*runner.notes, *tokenizer_code(path), *tokenizer.notes, *template.notes),
                *response_notes(template.response),
            )
        return Loaded(
            runner, tokenizer, template, defaults, notes, runner.architecture, runner.dtype, modules
        )

    def tokenizer(self, config: EngineConfig) -> Tokenizer:
        """The tokenizer alone. Raises `ModelLoadError`."""
        from asyncinfer.text import gguf_tokenizer
        from asyncinfer.weights.gguf import is_gguf, read_header

        path = self._path(config)
        if is_gguf(path):
            return gguf_tokenizer(read_header(path).metadata, str(path))
        with following_links(self._follows_links(config)):
            return Tokenizer.from_folder(path)

    def _check_architecture(self, config: EngineConfig) -> None:
        """Refuse a folder of an unknown architecture. Raises `ModelLoadError`."""
        folder = os.path.expanduser(self.model)
        if not os.path.isfile(os.path.join(folder, CONFIG_JSON)):
            return
        with following_links(config.follow_symlinks):
            values, file = read_config_json(folder)
        try:
            find_architecture(values, file)
        except ModelLoadError as error:
            raise ModelLoadError(
                f"{error}. What it would need: asyncinfer models --check {shlex.quote(folder)}",
            ) from None

    def _path(
        self, config: EngineConfig, check: Callable[[Path], object] = lambda folder: None
    ) -> Path:
        from asyncinfer.weights import resolve

        return resolve(self.model, revision=config.revision, check=check)

    def _follows_links(self, config: EngineConfig) -> bool:
        """Links are never followed in what comes from the hub, which anybody may have made."""
        return os.path.isdir(os.path.expanduser(self.model)) and config.follow_symlinks


def _check_fetched(folder: Path) -> None:
    """Refuse a model of the hub that cannot be loaded before its weights are fetched, which may
    take hours. Raises `ModelLoadError`."""
    from asyncinfer.models import read_config

    read_config(folder)
    Tokenizer.from_folder(folder)
