from asyncinfer.layers.attention import SelfAttention
from asyncinfer.layers.block import DecoderLayer
from asyncinfer.layers.mlp import GatedMLP
from asyncinfer.layers.norm import RMSNorm
from asyncinfer.layers.rope import RopeConfig, RotaryEmbedding

__all__ = [
    "DecoderLayer",
    "GatedMLP",
    "RMSNorm",
    "RopeConfig",
    "RotaryEmbedding",
    "SelfAttention",
]
