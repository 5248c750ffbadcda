from asyncinfer.models.config import ExpertsConfig, LayerConfig, ModelConfig
from asyncinfer.models.config_file import parse_config, read_config
from asyncinfer.models.decoder import Decoder
from asyncinfer.models.family import Family
from asyncinfer.models.load import load_model
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.registry import families
from asyncinfer.models.tensors import tensor_table
from asyncinfer.weights import LoadProgress

__all__ = [
    "Decoder",
    "ExpertsConfig",
    "Family",
    "JsonReader",
    "LayerConfig",
    "LoadProgress",
    "ModelConfig",
    "TensorNames",
    "families",
    "load_model",
    "parse_config",
    "read_config",
    "tensor_table",
]
