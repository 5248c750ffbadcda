"""Builds the mixers that keep a state, in place of attention or in parallel with it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncinfer.layers import (
    Attention,
    GatedDeltaNet,
    GatedNorm,
    KimiDeltaAttention,
    LoraLinear,
    Mamba2,
    RMSNorm,
    ShortConvolution,
)
from asyncinfer.models.parts import GatedDeltaConfig, KimiDeltaConfig, MambaConfig, MixerConfig

__all__ = ["build_mixer"]


def build_mixer(
    index: int,
    mixer: MixerConfig,
    name: str,
    norm_eps: float,
    tensor: Callable[[str], torch.Tensor],
    linear: Callable[[str, bool], LoraLinear],
) -> Attention:
    """The mixer of the layer `index`. `tensor` gives a tensor by its name in the tensor table, and
    `linear` the linear layer of a name, with a bias or without."""
    if isinstance(mixer, GatedDeltaConfig):
        return _delta(index, mixer, name, norm_eps, tensor, linear)
    if isinstance(mixer, KimiDeltaConfig):
        return _kimi(index, mixer, name, norm_eps, tensor, linear)
    if isinstance(mixer, MambaConfig):
        return _mamba(index, mixer, name, norm_eps, tensor, linear)
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
        RMSNorm(tensor(f"{name}.norm"), norm_eps if mixer.norm_eps is None else mixer.norm_eps),
        linear(f"{name}.out", False),
        mixer.beta_scale,
    )


def _kimi(
    index: int,
    mixer: KimiDeltaConfig,
    name: str,
    norm_eps: float,
    tensor: Callable[[str], torch.Tensor],
    linear: Callable[[str, bool], LoraLinear],
) -> KimiDeltaAttention:
    return KimiDeltaAttention(
        index,
        mixer.heads,
        linear(f"{name}.in", False),
        linear(f"{name}.forget", False),
        linear(f"{name}.gate", False),
        _filter(tensor(f"{name}.conv.weight")),
        tensor(f"{name}.rate").flatten(),
        tensor(f"{name}.bias"),
        RMSNorm(tensor(f"{name}.norm"), norm_eps),
        linear(f"{name}.out", False),
    )


def _mamba(
    index: int,
    mixer: MambaConfig,
    name: str,
    norm_eps: float,
    tensor: Callable[[str], torch.Tensor],
    linear: Callable[[str, bool], LoraLinear],
) -> Mamba2:
    written = mixer.groups * mixer.state_dim
    inputs = linear(f"{name}.in", mixer.in_bias)
    weight = _filter(tensor(f"{name}.conv.weight"))
    scales = None
    if set(mixer.in_scales) != {1.0}:
        sizes = torch.tensor([mixer.inner, mixer.inner, written, written, mixer.heads])
        each = torch.tensor(mixer.in_scales, dtype=torch.float32).repeat_interleave(sizes)
        scales = each.to(weight.device, weight.dtype)
    conv_bias = tensor(f"{name}.conv.bias") if mixer.conv_bias else None
    rate, bias, skip = (tensor(f"{name}.{part}") for part in ("rate", "bias", "skip"))
    norm = None if mixer.norm is None else tensor(f"{name}.norm")
    return Mamba2(
        index,
        mixer.heads,
        mixer.groups,
        (mixer.inner, written),
        inputs,
        scales,
        weight,
        conv_bias,
        rate,
        bias,
        mixer.steps,
        skip,
        GatedNorm(mixer.norm, norm, mixer.groups, norm_eps),
        linear(f"{name}.out", mixer.out_bias),
        mixer.out_scale,
    )


def _filter(weight: torch.Tensor) -> torch.Tensor:
    """`[channels, 1, width]`, as checkpoints have it, to `[width, channels]`."""
    return weight[:, 0].t().contiguous()
