"""Opens the draft model of an engine."""

from __future__ import annotations

from pathlib import Path

from asyncinfer.builtin import DRAFT_PATH, EMBEDDED
from asyncinfer.config import PREDICTOR, EngineConfig
from asyncinfer.engine.checkpoint import CheckpointSource
from asyncinfer.engine.drafting_head import drafting_head
from asyncinfer.engine.source import Loaded, ModelSource, Progress
from asyncinfer.errors import InvalidConfig
from asyncinfer.text import Tokenizer

__all__ = ["check_vocabulary", "open_draft"]


def open_draft(
    source: ModelSource, config: EngineConfig, progress: Progress | None
) -> Loaded | None:
    """Load `config.draft`, before the model that it drafts for, which takes a share of the memory
    that is left. None where there is none to load.

    Raises `InvalidConfig` where its vocabulary is another one, before memory is taken: checkpoints
    say so in their tokenizers. For others `check_vocabulary` says so when both are loaded.
    """
    named = config.draft
    if named is None or named == PREDICTOR:
        return None
    head = drafting_head(config)
    if head is not None:
        _check_head(source, config, head)
        return None
    draft: ModelSource = named
    if not hasattr(named, "load"):
        draft = CheckpointSource(DRAFT_PATH if named == EMBEDDED else named, draft=True)
    # A revision belongs to the large model's repository.
    own = config.replace(draft=None, revision=None)
    if isinstance(source, CheckpointSource) and isinstance(draft, CheckpointSource):
        check_vocabulary(named, source.tokenizer(config), draft.tokenizer(own))
    return draft.load(own, progress)


def _check_head(source: ModelSource, config: EngineConfig, head: Path) -> None:
    """Raise `InvalidConfig` for an engine that cannot have a drafting head, and for a head whose
    tokenizer shows that it was made for another model."""
    if config.deterministic:
        bound = "must be another one with deterministic=True: a head is not computed in tiles"
        raise InvalidConfig("draft", config.draft, bound)
    if not isinstance(source, CheckpointSource):
        raise InvalidConfig("draft", config.draft, "is a head, which needs a checkpoint's model")
    if (head / "tokenizer.json").exists():
        theirs = CheckpointSource(head).tokenizer(config.replace(draft=None, revision=None))
        check_vocabulary(config.draft, source.tokenizer(config), theirs)


def check_vocabulary(named: object, model: Tokenizer, draft: Tokenizer) -> None:
    """Raise `InvalidConfig` unless every token id means the same in both models."""
    other = model.difference(draft)
    if other is not None:
        token, ours, theirs = other
        raise InvalidConfig(
            "draft",
            named,
            f"must have the model's vocabulary: token {token} is {theirs!r}, not {ours!r}",
        )
