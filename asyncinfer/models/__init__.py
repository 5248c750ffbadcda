from asyncinfer.layers import AttentionTemperature, LearnedActivation, RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.config_file import parse_config, read_config
from asyncinfer.models.decoder import Decoder
from asyncinfer.models.examine import Examined, examine
from asyncinfer.models.examples import EXAMPLES, GROUPS
from asyncinfer.models.experts import read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.fetched import check_fetched
from asyncinfer.models.load import load_model, load_weights
from asyncinfer.models.mamba import read_mamba
from asyncinfer.models.names import PredictorNames, TensorNames
from asyncinfer.models.parts import (
    ExpertsConfig,
    GatedDeltaConfig,
    IndexerConfig,
    KimiDeltaConfig,
    LatentConfig,
    LayerConfig,
    MambaConfig,
    ShortConvConfig,
)
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.tensors import tensor_table
from asyncinfer.models.windows import sliding_layers, windowed
from asyncinfer.weights import (
    NAMED_MODELS,
    LoadProgress,
    NamedModel,
    WeightCache,
    pull,
    pulled,
    resolve,
)

__all__ = [
    "EXAMPLES",
    "GROUPS",
    "NAMED_MODELS",
    "AttentionTemperature",
    "Decoder",
    "Examined",
    "ExpertsConfig",
    "Family",
    "GatedDeltaConfig",
    "IndexerConfig",
    "JsonReader",
    "KimiDeltaConfig",
    "LatentConfig",
    "LayerConfig",
    "LearnedActivation",
    "LoadProgress",
    "MambaConfig",
    "ModelConfig",
    "NamedModel",
    "PredictorNames",
    "RopeConfig",
    "ShortConvConfig",
    "TensorNames",
    "WeightCache",
    "check_fetched",
    "examine",
    "load_model",
    "load_weights",
    "parse_config",
    "pull",
    "pulled",
    "read_config",
    "read_experts",
    "read_mamba",
    "resolve",
    "sliding_layers",
    "tensor_table",
    "windowed",
]
