"""`suited`: a model's config with the names of one checkpoint's tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from asyncinfer.files import checkpoint_file
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import GatedDeltaConfig
from asyncinfer.weights import TensorFiles

__all__ = ["suited"]

_NO_HEAD: Final = "it has no head: only its vectors mean something, its answers do not"


def suited(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with the names of this checkpoint's tensors, where an architecture's checkpoints
    differ: with or without a prefix, with or without a head, with all experts of a layer in one
    tensor, whose inputs or outputs come first, with other names of norms and of modules, with
    convolutions that are cut elsewhere."""
    config = _recut(_respelled(_without_prefix(config, checkpoint), checkpoint), checkpoint)
    config = _turned(_moved(config, checkpoint), checkpoint)
    fused = config.names.fused_experts
    if fused is None or not any(name.endswith(f".{fused[0]}") for name in checkpoint.tensors):
        return config
    names = replace(
        config.names, expert_up=fused[:1], expert_down=fused[1], expert_outputs_first=True
    )
    return replace(config, names=names)


def _respelled(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with those of `names.spellings` that the checkpoint has in place of the usual
    names."""
    names = config.names
    if not names.spellings:
        return config
    there = {".".join(name.split(".")[-2:]) for name in checkpoint.tensors}
    others: dict[str, Any] = {
        field: other
        for field, other in names.spellings
        if f"{getattr(names, field)}.weight" not in there and f"{other}.weight" in there
    }
    return replace(config, names=replace(names, **others))


def _moved(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with the second of `names.mlp_modules` for plain feed-forward layers, where the
    checkpoint has no tensor under the first: transformers saves Kimi Linear so."""
    names = config.names
    if names.mlp_modules is None:
        return config
    first, second = (f"{module}." for module in names.mlp_modules)
    if any(f".{first}" in name for name in checkpoint.tensors):
        return config
    up = tuple(name.replace(first, second) for name in names.up)
    names = replace(names, up=up, down=names.down.replace(first, second))
    return replace(config, names=names)


def _turned(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with outputs before inputs in tensors of all experts, where this checkpoint has
    them so: transformers saves Qwen3-VL's as it holds them in memory."""
    names, experts = config.names, config.experts
    if experts is None or "{}" in names.expert_down:
        return config
    ends = f".{names.expert_down}"
    stored = (each.shape for name, each in checkpoint.tensors.items() if name.endswith(ends))
    outputs_first = (experts.count, config.hidden_size, experts.intermediate_size)
    if config.hidden_size == experts.intermediate_size or next(stored, None) != outputs_first:
        return config
    return replace(config, names=replace(names, expert_outputs_first=True))


def _recut(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with the channels of a gated delta net's convolutions as this checkpoint cuts
    them: transformers saves thirds of all channels under the names of queries, keys and values."""
    names, mixers = config.names, {layer.mixer for layer in config.layers}
    mixer = next((each for each in mixers if isinstance(each, GatedDeltaConfig)), None)
    if mixer is None or len(names.delta_conv) == 1:
        return config
    prefix = f"{names.prefix}{names.layers}.{config.state_layers[0]}."
    stored = [checkpoint.tensors.get(f"{prefix}{name}.weight") for name in names.delta_conv]
    rows = tuple(tensor.shape[0] for tensor in stored if tensor is not None and tensor.shape)
    if len(rows) != len(stored) or sum(rows) != mixer.channels:
        return config
    return replace(config, names=replace(names, delta_conv_rows=rows))


def _without_prefix(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with an empty prefix if the checkpoint's tensors lack the architecture's prefix,
    as in a model that was saved without its head. An embedding model needs no head: where it has
    none, its embedding takes that place, so that no other code knows of models without a head."""
    prefix, other = config.names.prefix, config.names.other_prefix
    if any(name.startswith(prefix) for name in checkpoint.tensors):
        return config
    if other is not None and any(name.startswith(other[0]) for name in checkpoint.tensors):
        return replace(config, names=replace(config.names, prefix=other[0], head=other[1]))
    embedding = f"{config.names.embedding}.weight"
    if embedding not in checkpoint.tensors:
        return config
    config = replace(config, names=replace(config.names, prefix=""))
    headless = not config.tied_head and f"{config.names.head}.weight" not in checkpoint.tensors
    if headless and checkpoint_file(checkpoint.folder, "modules.json") is not None:
        return replace(config, tied_head=True, head_bias=False, notes=(*config.notes, _NO_HEAD))
    return config
