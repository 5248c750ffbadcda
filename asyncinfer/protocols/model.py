"""The protocol of model families, which read an architecture's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["MODEL_PROTOCOL_VERSION", "ModelFamily"]

MODEL_PROTOCOL_VERSION = 1


class ModelFamily(Protocol):
    """One architecture, known by the name that `config.json` gives under `architectures`.
    `asyncinfer.models.Family` is one to derive from: it states what differs from Llama.

    Used when a model is opened, on the engine's own thread. An attribute `model_type`, if it has
    one, is what `config.json` calls the architecture under that key: without it a checkpoint with
    an `auto_map` is refused.
    """

    def read(self, architecture: str, values: Mapping[str, Any], file: str) -> Any:
        """The shape of the decoder that `values`, the content of `file`, describes: an
        `asyncinfer.models.ModelConfig`. Raises `ModelLoadError` for impossible values."""
