from asyncinfer.layers.activation import (
    ACTIVATIONS,
    Activation,
    activation,
    clamped_swiglu,
    fused_gate,
)
from asyncinfer.layers.attention import Prepare, SelfAttention
from asyncinfer.layers.block import (
    Attention,
    DecoderLayer,
    FeedForward,
    Layer,
    ParallelLayer,
    followed,
)
from asyncinfer.layers.embedding import Embedding
from asyncinfer.layers.experts import Experts
from asyncinfer.layers.fused import FusedLayer
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
from asyncinfer.layers.rope import Angles, RopeConfig, RotaryEmbedding

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
    "HeadNorm",
    "Layer",
    "LayerNorm",
    "Norm",
    "NormKind",
    "ParallelLayer",
    "Prepare",
    "ProjectionNorm",
    "RMSNorm",
    "RopeConfig",
    "RotaryEmbedding",
    "Rotate",
    "RotatePart",
    "SelfAttention",
    "activation",
    "clamped_swiglu",
    "followed",
    "fused_gate",
    "make_norm",
    "normed_first",
    "unrotated",
]
