from asyncinfer.layers.activation import (
    ACTIVATIONS,
    Activation,
    LearnedActivation,
    activation,
    clamped_swiglu,
    fused_gate,
    learned,
    renamed,
)
from asyncinfer.layers.attention import (
    HeadNorm,
    Prepare,
    ProjectionNorm,
    Rotate,
    RotatePart,
    SelfAttention,
    SharedAttention,
    normed_first,
    normed_last,
    unrotated,
)
from asyncinfer.layers.block import (
    MLP,
    Attention,
    DecoderLayer,
    FeedForward,
    Layer,
    ParallelLayer,
    SublayerOnly,
    added,
    added_attention,
    fed,
    followed,
    gated,
    normed,
    scaled,
)
from asyncinfer.layers.checks import check_choice, check_flags, check_integers, check_number, refuse
from asyncinfer.layers.convolution import ShortConvolution
from asyncinfer.layers.experts import Experts
from asyncinfer.layers.forward_pass import ForwardPass
from asyncinfer.layers.fused import FusedLayer, FusedMLP, NormedExperts
from asyncinfer.layers.gated_delta import GatedDeltaNet
from asyncinfer.layers.kimi_delta import KimiDeltaAttention
from asyncinfer.layers.latent import Indexer, LatentAttention
from asyncinfer.layers.lora import LoraLayers, LoraLinear, LoraRows, LoraWeights
from asyncinfer.layers.lora_rows import DeviceLoraRows, GroupedLoraRows, JoinedLoraRows
from asyncinfer.layers.mamba import GatedNorm, Mamba2
from asyncinfer.layers.norm import Norm, NormKind, RMSNorm, make_norm
from asyncinfer.layers.per_layer import PerLayerInputs, WithPerLayerInput
from asyncinfer.layers.rope import RopeConfig, RopeType, RotaryEmbedding
from asyncinfer.layers.router import (
    GroupedRouter,
    Route,
    SoftmaxRouter,
    SparseMixer,
    scaled_by_expert,
)
from asyncinfer.layers.temperature import AttentionTemperature

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Activation",
    "Attention",
    "AttentionTemperature",
    "DecoderLayer",
    "DeviceLoraRows",
    "Experts",
    "FeedForward",
    "ForwardPass",
    "FusedLayer",
    "FusedMLP",
    "GatedDeltaNet",
    "GatedNorm",
    "GroupedLoraRows",
    "GroupedRouter",
    "HeadNorm",
    "Indexer",
    "JoinedLoraRows",
    "KimiDeltaAttention",
    "LatentAttention",
    "Layer",
    "LearnedActivation",
    "LoraLayers",
    "LoraLinear",
    "LoraRows",
    "LoraWeights",
    "Mamba2",
    "Norm",
    "NormKind",
    "NormedExperts",
    "ParallelLayer",
    "PerLayerInputs",
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
    "SharedAttention",
    "ShortConvolution",
    "SoftmaxRouter",
    "SparseMixer",
    "SublayerOnly",
    "WithPerLayerInput",
    "activation",
    "added",
    "added_attention",
    "check_choice",
    "check_flags",
    "check_integers",
    "check_number",
    "clamped_swiglu",
    "fed",
    "followed",
    "fused_gate",
    "gated",
    "learned",
    "make_norm",
    "normed",
    "normed_first",
    "normed_last",
    "refuse",
    "renamed",
    "scaled",
    "scaled_by_expert",
    "unrotated",
]
