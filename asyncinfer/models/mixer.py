"""Builds what stands in place of attention and keeps a state."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncinfer.layers import Attention, GatedDeltaNet, LoraLinear, RMSNorm, ShortConvolution
from asyncinfer.models.parts import GatedDeltaConfig, ShortConvConfig

__all__ = ["build_mixer"]


def build_mixer(
    index: int,
    mixer: ShortConvConfig | GatedDeltaConfig,
    name: str,
    norm_eps: float,
    tensor: Callable[[str], torch.Tensor],
    linear: Callable[[str, bool], LoraLinear],
) -> Attention:
    """The mixer of the layer `index`. `tensor` gives a tensor by its name in the tensor table, and
    `linear` the linear layer of a name, with a bias or without."""
    if isinstance(mixer, GatedDeltaConfig):
        return _delta(index, mixer, name, norm_eps, tensor, linear)
    inputs = linear(f"{name}.in", mixer.bias)
    weight = _filter(tensor(f"{name}.conv.weight"))
    bias = tensor(f"{name}.conv.bias") if mixer.bias else None
    return ShortConvolution(index, inputs, weight, bias, linear(f"{name}.out", mixer.bias))


def _delta(
    index: int,
    mixer: GatedDeltaConfig,
    name: str,
    norm_eps: float,
    tensor: Callable[[str], torch.Tensor],
    linear: Callable[[str, bool], LoraLinear],
) -> GatedDeltaNet:
    return GatedDeltaNet(
        index,
        mixer.key_heads,
        mixer.heads,
        mixer.key_heads * mixer.key_dim,
        linear(f"{name}.in", False),
        linear(f"{name}.gates", False),
        _filter(tensor(f"{name}.conv.weight")),
        tensor(f"{name}.rate"),
        tensor(f"{name}.bias"),
        RMSNorm(tensor(f"{name}.norm"), norm_eps),
        linear(f"{name}.out", False),
    )


def _filter(weight: torch.Tensor) -> torch.Tensor:
    """`[channels, 1, width]`, as checkpoints have it, to `[width, channels]`."""
    return weight[:, 0].t().contiguous()
