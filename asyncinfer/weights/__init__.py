from asyncinfer.weights.checkpoint import SafetensorsCheckpoint
from asyncinfer.weights.folder import checkpoint_file, following_links
from asyncinfer.weights.json_file import read_json
from asyncinfer.weights.loader import WeightLoader
from asyncinfer.weights.memory import is_out_of_memory
from asyncinfer.weights.named import NAMED_MODELS, HubFile, NamedModel, WheelFile
from asyncinfer.weights.packed import Packed, Piece, WeightSource, check_weights
from asyncinfer.weights.progress import LoadProgress, OnProgress
from asyncinfer.weights.pull import pull, pulled
from asyncinfer.weights.resolve import resolve, resolve_config
from asyncinfer.weights.tensor_files import StoredTensor, TensorFiles

__all__ = [
    "NAMED_MODELS",
    "HubFile",
    "LoadProgress",
    "NamedModel",
    "OnProgress",
    "Packed",
    "Piece",
    "SafetensorsCheckpoint",
    "StoredTensor",
    "TensorFiles",
    "WeightLoader",
    "WeightSource",
    "WheelFile",
    "check_weights",
    "checkpoint_file",
    "following_links",
    "is_out_of_memory",
    "pull",
    "pulled",
    "read_json",
    "resolve",
    "resolve_config",
]
