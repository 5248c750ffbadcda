from asyncinfer.models.config import ModelConfig
from asyncinfer.models.decoder import Decoder
from asyncinfer.models.load import load_model
from asyncinfer.models.tensors import tensor_table
from asyncinfer.weights import LoadProgress

__all__ = ["Decoder", "LoadProgress", "ModelConfig", "load_model", "tensor_table"]
