"""Parts of a `ModelConfig`: what differs from layer to layer, experts, latent attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from asyncinfer.layers import (
    AttentionTemperature,
    RopeConfig,
    check_choice,
    check_flags,
    check_integers,
    check_number,
    refuse,
)
from asyncinfer.models.bounds import (
    MOST_CONTEXT,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_VOCAB,
    MOST_WIDTH,
)
from asyncinfer.models.latent_config import IndexerConfig, LatentConfig
from asyncinfer.models.mixer_configs import (
    GatedDeltaConfig,
    KimiDeltaConfig,
    MambaConfig,
    MixerConfig,
    ShortConvConfig,
)

__all__ = [
    "DTYPES",
    "MOST_CONTEXT",
    "MOST_HEADS",
    "MOST_HEAD_DIM",
    "MOST_LAYERS",
    "MOST_VOCAB",
    "MOST_WIDTH",
    "Block",
    "ExpertsConfig",
    "GatedDeltaConfig",
    "IndexerConfig",
    "KimiDeltaConfig",
    "LatentConfig",
    "LayerConfig",
    "MambaConfig",
    "MixerConfig",
    "QKNorm",
    "Scoring",
    "ShortConvConfig",
]

#: Dtypes of a checkpoint, by torch's names.
DTYPES: Final = ("float32", "float16", "bfloat16")
#: Over all layers of a model, since each expert means a few tensors.
_MOST_EXPERTS: Final = 1 << 17
_MOST_WINDOW: Final = 2**31 - 1
_MIXERS: Final = f"must be of {', '.join(kind.__name__ for kind in get_args(MixerConfig))}, or None"

#: Where a layer's norms stand. "pre": before attention and before the feed-forward layer; "post":
#: after each, before it is added; "sandwich": both. "parallel": attention and feed-forward side by
#: side, each after a norm of its own; "parallel-shared": after one norm.
Block = Literal["pre", "post", "sandwich", "parallel", "parallel-shared"]
#: RMS norm of queries and keys: of each head, before the rotation or after it ("rotated-head"), or
#: over the whole projection.
QKNorm = Literal["head", "rotated-head", "projection"]
#: The function from a router's logits to its scores.
Scoring = Literal["softmax", "sigmoid", "sparse-mixer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """The settings that may differ from layer to layer."""

    #: None: queries and keys are not rotated.
    rope: RopeConfig | None
    #: Where its norms are; None: as in the model's `block`.
    block: Block | None = None
    #: A token sees this many tokens, including itself; None: all before it. In a bidirectional
    #: model the token sees as many on its other side.
    window: int | None = None
    #: Whether positions are cut into chunks of `window` tokens in place of a sliding window: a
    #: token sees those before it in its own chunk.
    chunked: bool = False
    #: Whether queries and keys have a norm, if the model's have one.
    qk_norm: bool = True
    #: The factor of the queries by their position; None: there is none.
    temperature: AttentionTemperature | None = None
    #: Whether its feed-forward part is a mixture of experts, if the model has experts.
    experts: bool = True
    #: The mixer that keeps a state, in place of attention or in parallel with it; None: no mixer.
    mixer: MixerConfig | None = None
    #: Whether there is attention; None: where there is no mixer. A mixer and attention in one layer
    #: have the same input, and their outputs are added.
    attention: bool | None = None
    #: Whether there is a feed-forward part, plain or of experts.
    feed_forward: bool = True
    #: Dimensions of its heads, its number of KV heads, and the width of its feed-forward part;
    #: None: as in the model.
    head_dim: int | None = None
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    #: The earlier layer whose keys and values it attends to; None: it has its own.
    shares_kv: int | None = None
    #: Whether its values are its keys before norm and rotation.
    keys_as_values: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.mixer, MixerConfig | None):
            raise refuse(self, "mixer", _MIXERS)
        if self.attention is not None:
            check_flags(self, "attention")
        check_flags(self, "feed_forward")
        if not self.attends and (self.rope is not None or self.window is not None):
            raise refuse(self, "rope", "and window must be None in a layer without attention")
        if not self.attends and self.mixer is None and not self.feed_forward:
            raise refuse(self, "feed_forward", "must be True in a layer with nothing else")
        check_choice(self, "block", (None, *get_args(Block)))
        if self.rope is not None and not isinstance(self.rope, RopeConfig):
            raise refuse(self, "rope", "must be a RopeConfig or None")
        if not isinstance(self.temperature, AttentionTemperature | None):
            raise refuse(self, "temperature", "must be an AttentionTemperature or None")
        if self.temperature is not None and not self.attends:
            raise refuse(self, "temperature", "must be None in a layer without attention")
        if self.window is not None:
            check_integers(self, "window", low=1, high=_MOST_WINDOW)
        check_flags(self, "experts", "keys_as_values", "chunked", "qk_norm")
        if self.chunked and self.window is None:
            raise refuse(self, "chunked", "must be False without a window")
        self._check_sizes()

    def _check_sizes(self) -> None:
        sizes = {
            "head_dim": (1, MOST_WIDTH),
            "num_kv_heads": (1, MOST_HEADS),
            "intermediate_size": (1, MOST_WIDTH),
            "shares_kv": (0, MOST_LAYERS - 1),
        }
        for name, (low, high) in sizes.items():
            if getattr(self, name) is not None:
                check_integers(self, name, low=low, high=high)
        if self.shares_kv is not None and (not self.attends or self.keys_as_values):
            raise refuse(self, "shares_kv", "must be None without keys and values of its own")

    @property
    def attends(self) -> bool:
        """Whether there is attention, and so KV."""
        return self.mixer is None if self.attention is None else self.attention


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts in place of the feed-forward layer."""

    #: How many there are, and how many each token takes.
    count: int
    active: int
    #: `intermediate_size` of each expert.
    intermediate_size: int
    #: Whether a token's weights are scaled to sum to one.
    normalise: bool = True
    router_bias: bool = False
    bias: bool = False
    scoring: Scoring = "softmax"
    #: Experts come in this many groups, and a token takes its experts from the best few groups.
    groups: int = 1
    active_groups: int = 1
    #: A group's score is the sum of so many of its best experts' scores.
    group_best: int = 1
    #: Whether a bias is added to the scores when experts are chosen, and only then.
    correction: bool = False
    #: Multiplies the weights.
    scale: float = 1.0
    #: Added to the sum of a token's weights where these are normalised, unless the scores are a
    #: softmax without groups, correction or scale.
    epsilon: float = 1e-20
    #: For "sparse-mixer": half the relative distance from the best logit within which others count.
    jitter: float = 0.01
    #: `intermediate_size` of the shared expert, which every token takes; 0: there is none.
    shared_size: int = 0
    #: Whether the shared expert's output is multiplied by the sigmoid of a projection of its input.
    shared_gate: bool = False
    #: Whether the weights of a token's experts multiply their inputs in place of their outputs.
    weigh_inputs: bool = False
    #: Whether the router norms the layer's input by itself, and whether each expert's weight has a
    #: learned factor.
    router_norm: bool = False
    expert_scale: bool = False
    #: Whether experts are in parallel with the plain feed-forward part. Both take the layer's
    #: input, each has norms of its own before and after it, and the outputs are added.
    beside: bool = False
    #: None: the model's activation. Else the clamped SwiGLU's (alpha, limit).
    clamped_swiglu: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_integers(self, "count", low=1, high=_MOST_EXPERTS)
        check_integers(self, "active", low=1, high=self.count)
        check_integers(self, "intermediate_size", low=1, high=MOST_WIDTH)
        check_integers(self, "shared_size", low=0, high=64 * MOST_WIDTH)
        check_flags(self, "normalise", "router_bias", "bias", "correction", "shared_gate")
        check_flags(self, "weigh_inputs", "router_norm", "expert_scale", "beside")
        if self.beside and self.shared_size:
            raise refuse(self, "beside", "must be False with a shared expert")
        if self.shared_gate and not self.shared_size:
            raise refuse(self, "shared_gate", "must be False without a shared expert")
        check_choice(self, "scoring", get_args(Scoring))
        check_number(self, "scale")
        check_number(self, "epsilon", high=1.0)
        check_number(self, "jitter", high=1.0)
        self._check_groups()
        rest = (self.active, self.groups, self.normalise, self.correction, self.scale)
        if self.scoring == "sparse-mixer" and rest != (2, 1, False, False, 1.0):
            bound = "needs active=2, one group, and no normalise, correction or scale"
            raise refuse(self, "scoring", bound)
        rule = self.clamped_swiglu
        if rule is not None and not (
            isinstance(rule, tuple)
            and len(rule) == 2
            and all(type(value) in (int, float) and 0 < value < math.inf for value in rule)
        ):
            raise refuse(self, "clamped_swiglu", "must be None or two finite numbers above 0")

    def _check_groups(self) -> None:
        check_integers(self, "groups", low=1, high=self.count)
        check_integers(self, "active_groups", low=1, high=self.groups)
        size = self.count // self.groups
        if self.count % self.groups:
            raise refuse(self, "groups", f"must divide count={self.count}")
        check_integers(self, "group_best", low=1, high=self.count)
        if self.groups > 1 and size < self.group_best:
            bound = f"must be at most {size}, as many as a group has"
            raise refuse(self, "group_best", bound)
        if self.active > self.active_groups * size:
            bound = f"has {self.active_groups * size} experts for active={self.active}"
            raise refuse(self, "active_groups", bound)
