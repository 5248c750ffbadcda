"""The configs of mixers, which keep a state in place of attention or in parallel with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from asyncinfer.attention import StateShape
from asyncinfer.layers import check_choice, check_flags, check_integers, check_number, refuse
from asyncinfer.models.bounds import MOST_HEAD_DIM, MOST_HEADS

__all__ = [
    "GatedDeltaConfig",
    "KimiDeltaConfig",
    "MambaConfig",
    "MambaNorm",
    "MixerConfig",
    "ShortConvConfig",
]

#: The RMS norm of a Mamba-2 layer's output, each group of channels by itself: after the gate, or
#: before it.
MambaNorm = Literal["gate-first", "norm-first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """LFM2's gated short convolution, in place of attention."""

    #: Tokens that the convolution sees, including the token itself.
    width: int
    #: Whether the convolution and both projections have a bias.
    bias: bool = False

    def __post_init__(self) -> None:
        check_integers(self, "width", low=2, high=1 << 10)
        check_flags(self, "bias")

    def state(self, hidden_size: int) -> tuple[StateShape, ...]:
        """What a layer keeps of a sequence: the inputs of the last tokens."""
        return (StateShape((self.width - 1, hidden_size)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """A gated delta net, such as Qwen3-Next's, in place of attention: a convolution and a matrix
    per head, which the gated delta rule changes with each token."""

    #: Heads of queries and keys, and of values, a multiple of these.
    key_heads: int
    heads: int
    #: Dimensions of a head of queries and keys, and of values.
    key_dim: int
    value_dim: int
    #: Tokens that the convolution sees, including the token itself.
    width: int
    #: The factor of beta. Above 1 a token can flip the sign of a part of the state.
    beta_scale: float = 1.0
    #: The epsilon of the norm of the outputs; None: that of the model's norms.
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        check_integers(self, "key_heads", "heads", low=1, high=MOST_HEADS)
        check_integers(self, "key_dim", "value_dim", low=1, high=MOST_HEAD_DIM)
        check_integers(self, "width", low=2, high=1 << 10)
        check_number(self, "beta_scale")
        if self.norm_eps is not None:
            check_number(self, "norm_eps", high=1.0)
        if self.heads % self.key_heads:
            raise refuse(self, "heads", f"must be a multiple of key_heads={self.key_heads}")

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def state(self, hidden_size: int) -> tuple[StateShape, ...]:
        """What a layer keeps of a sequence: the convolution's last inputs, and the matrices."""
        matrices = StateShape((self.heads, self.key_dim, self.value_dim), torch.float32)
        return StateShape((self.width - 1, self.channels)), matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Mamba-2 (Dao and Gu, 2024): a convolution and a matrix per head, which decays and to which
    each token adds."""

    heads: int
    head_dim: int
    #: Dimensions of the state, besides those of a head.
    state_dim: int
    #: Groups of adjacent heads that share what is written to the state and read from it.
    groups: int
    #: Tokens that the convolution sees, including the token itself.
    width: int
    conv_bias: bool = True
    #: Whether the projections before and after have a bias.
    in_bias: bool = False
    out_bias: bool = False
    #: None: there is the gate alone, without a norm.
    norm: MambaNorm | None = "gate-first"
    #: The bounds of a token's step.
    steps: tuple[float, float] = (0.0, math.inf)
    #: Factors of the parts of the input projection: gate, heads, writes, reads, step.
    in_scales: tuple[float, ...] = (1.0,) * 5
    #: The factor of the layer's output.
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        check_integers(self, "heads", "groups", low=1, high=MOST_HEADS)
        check_integers(self, "head_dim", "state_dim", low=1, high=MOST_HEAD_DIM)
        check_integers(self, "width", low=2, high=1 << 10)
        check_flags(self, "conv_bias", "in_bias", "out_bias")
        check_choice(self, "norm", (None, *get_args(MambaNorm)))
        if self.heads % self.groups:
            raise refuse(self, "groups", f"must divide heads={self.heads}")
        for name, count in (("steps", 2), ("in_scales", 5)):
            values = getattr(self, name)
            if not (
                isinstance(values, tuple)
                and len(values) == count
                and all(type(value) in (int, float) and value >= 0 for value in values)
            ):
                raise refuse(self, name, f"must be a tuple of {count} numbers from 0 on")
        if self.steps[0] > self.steps[1]:
            raise refuse(self, "steps", "must be in order")
        if max(self.in_scales) == math.inf:
            raise refuse(self, "in_scales", "must be finite")
        check_number(self, "out_scale")

    @property
    def inner(self) -> int:
        """Dimensions of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: the heads, what is written and what is read."""
        return self.inner + 2 * self.groups * self.state_dim

    def state(self, hidden_size: int) -> tuple[StateShape, ...]:
        """What a layer keeps of a sequence: the convolution's last inputs, and the matrices."""
        matrices = StateShape((self.heads, self.state_dim, self.head_dim), torch.float32)
        return StateShape((self.width - 1, self.channels)), matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaConfig:
    """Kimi Delta Attention (Moonshot AI, 2025), in place of attention: a gated delta net whose
    states decay at a speed of their own in each dimension of a key."""

    heads: int
    #: Dimensions of a head of queries, keys and values alike, and of the small vectors that decays
    #: and gates are made of.
    head_dim: int
    #: Tokens that the convolution sees, including the token itself.
    width: int

    def __post_init__(self) -> None:
        check_integers(self, "heads", low=1, high=MOST_HEADS)
        check_integers(self, "head_dim", low=1, high=MOST_HEAD_DIM)
        check_integers(self, "width", low=2, high=1 << 10)

    @property
    def inner(self) -> int:
        """Dimensions of all heads together."""
        return self.heads * self.head_dim

    def state(self, hidden_size: int) -> tuple[StateShape, ...]:
        """What a layer keeps of a sequence: the convolution's last inputs, and the matrices."""
        matrices = StateShape((self.heads, self.head_dim, self.head_dim), torch.float32)
        return StateShape((self.width - 1, 3 * self.inner)), matrices


#: The config of a layer that keeps a state in place of KV.
MixerConfig = ShortConvConfig | GatedDeltaConfig | MambaConfig | KimiDeltaConfig
