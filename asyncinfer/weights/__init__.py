from asyncinfer.weights.checkpoint import SafetensorsCheckpoint, open_checkpoint
from asyncinfer.weights.copy_key import copy_key
from asyncinfer.weights.loader import LoadProgress, OnProgress, WeightLoader
from asyncinfer.weights.memory import host_bytes, is_out_of_memory
from asyncinfer.weights.named import NAMED_MODELS, HubFile, NamedModel, WheelFile
from asyncinfer.weights.packed import Packed, Piece, WeightSource, alike, check_weights
from asyncinfer.weights.pull import pull, pulled
from asyncinfer.weights.quantised import torch_dtype
from asyncinfer.weights.resolve import resolve, resolve_config
from asyncinfer.weights.tensor_files import TensorFiles
from asyncinfer.weights.weight_cache import WeightCache
from asyncinfer.weights.weight_copy import MappedCopy, WeightCopy, WrittenCopy

__all__ = [
    "NAMED_MODELS",
    "HubFile",
    "LoadProgress",
    "MappedCopy",
    "NamedModel",
    "OnProgress",
    "Packed",
    "Piece",
    "SafetensorsCheckpoint",
    "TensorFiles",
    "WeightCache",
    "WeightCopy",
    "WeightLoader",
    "WeightSource",
    "WheelFile",
    "WrittenCopy",
    "alike",
    "check_weights",
    "copy_key",
    "host_bytes",
    "is_out_of_memory",
    "open_checkpoint",
    "pull",
    "pulled",
    "resolve",
    "resolve_config",
    "torch_dtype",
]
