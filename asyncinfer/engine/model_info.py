"""`ModelInfo`: the public facts about a model."""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncinfer.builtin import EMBEDDED, MODEL_PATH
from asyncinfer.config import EngineConfig
from asyncinfer.engine.chats import Chats
from asyncinfer.engine.source import Loaded, ModelSource

__all__ = ["ModelInfo", "info_of"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model of an open engine, `engine.model`."""

    #: "embedded", a name or hub id as it was given, or the last part of a path.
    name: str
    #: As `architectures` in `config.json` has it; empty for a model without one.
    architecture: str
    #: Tokens of the longest sequence, prompt and answer together, as the engine was opened.
    max_context: int
    #: The largest token id, plus one.
    vocab_size: int
    #: The dtype that it computes in, such as "float32"; "auto" for a model without tensors.
    dtype: str
    #: The formats of weights and KV, as configured: `EngineConfig.weights`, `kv`.
    weights: str
    kv: str
    #: Whether prompts may be chat messages.
    has_chat_template: bool
    #: The format of its tool calls: the name of a family, "json" if its template knows no tools.
    tool_format: str
    #: Whether its answers may begin with reasoning.
    has_reasoning: bool


def info_of(source: ModelSource, loaded: Loaded, config: EngineConfig) -> ModelInfo:
    spec, family = loaded.runner.spec, Chats(loaded).family
    return ModelInfo(
        name=_name(source),
        architecture=loaded.architecture,
        max_context=spec.max_context,
        vocab_size=spec.vocab_size,
        dtype=loaded.dtype or config.dtype,
        weights=config.weights,
        kv=config.kv,
        has_chat_template=bool(loaded.template),
        tool_format=family.name,
        has_reasoning=family.reasoning is not None or family.calls is None,
    )


def _name(source: ModelSource) -> str:
    model = getattr(source, "model", None)
    if model == MODEL_PATH:
        return EMBEDDED
    if isinstance(model, str | os.PathLike):
        path = os.path.expanduser(model)
        return os.path.basename(os.path.abspath(path)) if os.path.exists(path) else str(model)
    return type(source).__name__
