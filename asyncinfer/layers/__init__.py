from asyncinfer.layers.activation import (
    ACTIVATIONS,
    Activation,
    LearnedActivation,
    activation,
    clamped_swiglu,
    fused_gate,
    learned,
)
from asyncinfer.layers.attention import Prepare, SelfAttention
from asyncinfer.layers.block import (
    Attention,
    DecoderLayer,
    FeedForward,
    Layer,
    ParallelLayer,
    added,
    followed,
)
from asyncinfer.layers.checks import (
    check_choice,
    check_flags,
    check_integers,
    check_number,
    refuse,
)
from asyncinfer.layers.embedding import Embedding
from asyncinfer.layers.experts import Experts
from asyncinfer.layers.fused import FusedLayer, FusedMLP, normed_experts
from asyncinfer.layers.latent import LatentAttention
from asyncinfer.layers.mlp import MLP
from asyncinfer.layers.norm import LayerNorm, Norm, NormKind, RMSNorm, make_norm
from asyncinfer.layers.prepare import (
    HeadNorm,
    ProjectionNorm,
    Rotate,
    RotatePart,
    normed_first,
    unrotated,
)
from asyncinfer.layers.rope import Angles, RopeConfig, RopeType, RotaryEmbedding
from asyncinfer.layers.router import GroupedRouter, Route, SoftmaxRouter

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Activation",
    "Angles",
    "Attention",
    "DecoderLayer",
    "Embedding",
    "Experts",
    "FeedForward",
    "FusedLayer",
    "FusedMLP",
    "GroupedRouter",
    "HeadNorm",
    "LatentAttention",
    "Layer",
    "LayerNorm",
    "LearnedActivation",
    "Norm",
    "NormKind",
    "ParallelLayer",
    "Prepare",
    "ProjectionNorm",
    "RMSNorm",
    "RopeConfig",
    "RopeType",
    "RotaryEmbedding",
    "Rotate",
    "RotatePart",
    "Route",
    "SelfAttention",
    "SoftmaxRouter",
    "activation",
    "added",
    "check_choice",
    "check_flags",
    "check_integers",
    "check_number",
    "clamped_swiglu",
    "followed",
    "fused_gate",
    "learned",
    "make_norm",
    "normed_experts",
    "normed_first",
    "refuse",
    "unrotated",
]
