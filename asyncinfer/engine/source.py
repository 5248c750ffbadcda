"""Where an engine's model comes from: `ModelSource`, and the one for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from asyncinfer.config import EngineConfig
from asyncinfer.engine.defaults import GenerationDefaults
from asyncinfer.scheduler import StepRunner
from asyncinfer.stats import LoadProgress
from asyncinfer.text import ChatTemplate, Tokenizer

if TYPE_CHECKING:
    from asyncinfer.models.embedding_modules import EmbeddingModules

__all__ = ["Loaded", "ModelSource", "Progress"]

Progress = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an engine needs of a model."""

    runner: StepRunner
    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    #: Sampling options of requests that do not name them.
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    #: What to know of how it was loaded, for the log.
    notes: tuple[str, ...] = ()
    #: The architecture's name, as `architectures` in `config.json` has it; empty where it has none.
    architecture: str = ""
    #: The dtype that the model computes in, by torch's name, such as "float32"; "" if unknown.
    dtype: str = ""
    #: How embeddings are made; None where the model's files do not say.
    modules: EmbeddingModules | None = None


class ModelSource(Protocol):
    """Anything `Engine(model=...)` accepts beside a path or a hub id."""

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        """Load; runs on the decode thread. Raises `ModelLoadError`."""
