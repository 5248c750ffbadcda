from asyncinfer.models.config import ExpertsConfig, LatentConfig, LayerConfig, ModelConfig
from asyncinfer.models.config_file import parse_config, read_config
from asyncinfer.models.decoder import Decoder
from asyncinfer.models.examine import Examined, examine
from asyncinfer.models.experts import read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.load import load_model, load_weights
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.tensors import tensor_table
from asyncinfer.models.windows import sliding_layers, windowed
from asyncinfer.weights import LoadProgress

__all__ = [
    "Decoder",
    "Examined",
    "ExpertsConfig",
    "Family",
    "JsonReader",
    "LatentConfig",
    "LayerConfig",
    "LoadProgress",
    "ModelConfig",
    "TensorNames",
    "examine",
    "load_model",
    "load_weights",
    "parse_config",
    "read_config",
    "read_experts",
    "sliding_layers",
    "tensor_table",
    "windowed",
]
