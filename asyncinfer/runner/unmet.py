"""Options that some models cannot meet."""

from __future__ import annotations

import torch

from asyncinfer.config import EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import ModelConfig

__all__ = ["check_options"]


def check_options(
    config: EngineConfig, model: ModelConfig, device: torch.device, one_group: bool
) -> None:
    """Raise `ModelLoadError` for options that `model` cannot meet. `one_group`: it is to be a draft
    model."""
    if model.bidirectional:
        _check_whole(config, device, one_group)
    if model.state_layers:
        _check_states(config, device, one_group)
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


def _check_states(config: EngineConfig, device: torch.device, one_group: bool) -> None:
    """Refuse options that layers with a state cannot meet."""
    if one_group:
        raise ModelLoadError("a model with states in place of KV cannot be a draft model")
    if device.type != "cpu":
        raise ModelLoadError(
            f"device={config.device!r}: a model with states in place of KV runs on a CPU only"
        )
    if config.deterministic:
        raise ModelLoadError(
            "deterministic=True: a model with states in place of KV cannot be computed in tiles"
        )


def _check_whole(config: EngineConfig, device: torch.device, one_group: bool) -> None:
    """Refuse options that a model whose tokens see each other cannot meet."""
    if one_group:
        raise ModelLoadError("a model whose tokens see each other cannot be a draft model")
    if device.type != "cpu":
        raise ModelLoadError(
            f"device={config.device!r}: a model whose tokens see each other runs on a CPU only"
        )
    if config.deterministic:
        raise ModelLoadError(
            "deterministic=True: a model whose tokens see each other cannot be computed in tiles"
        )
    if (config.max_context or 0) > config.max_step_tokens:
        raise ModelLoadError(
            f"max_context={config.max_context}: a model whose tokens see each other takes a text "
            f"in one step, of max_step_tokens={config.max_step_tokens} at most"
        )
