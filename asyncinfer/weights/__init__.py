from asyncinfer.weights.checkpoint import Checkpoint, StoredTensor
from asyncinfer.weights.folder import checkpoint_file
from asyncinfer.weights.json_file import read_json
from asyncinfer.weights.loader import WeightLoader
from asyncinfer.weights.memory import is_out_of_memory
from asyncinfer.weights.packed import Packed, Piece, WeightSource, check_weights
from asyncinfer.weights.progress import LoadProgress, OnProgress
from asyncinfer.weights.resolve import resolve, resolve_config

__all__ = [
    "Checkpoint",
    "LoadProgress",
    "OnProgress",
    "Packed",
    "Piece",
    "StoredTensor",
    "WeightLoader",
    "WeightSource",
    "check_weights",
    "checkpoint_file",
    "is_out_of_memory",
    "read_json",
    "resolve",
    "resolve_config",
]
