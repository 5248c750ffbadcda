"""`ModelConfig`: what a checkpoint's `config.json` says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ModelConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder."""

    #: The name `config.json` gives under `architectures`, such as `LlamaForCausalLM`.
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Longest sequence the model was made for (`max_position_embeddings`).
    max_context: int
    #: The checkpoint's own dtype as torch names it ("bfloat16"), or None where it does not say.
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, file: str = "config.json") -> ModelConfig:
        """Read and check a `config.json`'s content; `ModelLoadError` names the key that lies."""
        raise NotImplementedError

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read and check `folder/config.json`."""
        raise NotImplementedError
