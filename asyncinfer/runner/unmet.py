"""Refuses options that a model does not support."""

from __future__ import annotations

import torch

from asyncinfer.config import EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import ModelConfig

__all__ = ["check_options"]


def check_options(
    config: EngineConfig, model: ModelConfig, device: torch.device, one_group: bool
) -> None:
    """Raise `ModelLoadError` for options that `model` does not support. `one_group`: it will be a
    draft model."""
    if model.bidirectional:
        _check_plain(config, one_group, "a model whose tokens see each other")
        if device.type != "cpu":
            raise ModelLoadError(
                f"device={config.device!r}: a model whose tokens see each other runs on a CPU only"
            )
        if (config.max_context or 0) > config.max_step_tokens:
            raise ModelLoadError(
                f"max_context={config.max_context}: a model whose tokens see each other takes a "
                f"text in one step, of max_step_tokens={config.max_step_tokens} at most"
            )
    if model.state_layers:
        _check_plain(config, one_group, "a model with states in place of KV")
    if config.deterministic and model.indexed is not None:
        raise ModelLoadError(
            "deterministic=True: a model whose tokens are chosen by an indexer cannot be computed "
            "in tiles"
        )
    context = config.max_context or model.max_context
    if model.chunk is not None and model.chunk % config.block_size and model.chunk < context:
        raise ModelLoadError(
            f"block_size={config.block_size}: must divide {model.chunk}, the tokens that a chunk "
            "of this model's attention has"
        )
    if config.deterministic and not model.uniform_kv:
        raise ModelLoadError(
            "deterministic=True: a model whose layers differ in keys and values cannot be computed "
            "in tiles"
        )


def _check_plain(config: EngineConfig, one_group: bool, model: str) -> None:
    """Refuse every option that needs causal attention over KV. `model`: its name in errors."""
    if one_group:
        raise ModelLoadError(f"{model} cannot be a draft model")
    if config.deterministic:
        raise ModelLoadError(f"deterministic=True: {model} cannot be computed in tiles")
