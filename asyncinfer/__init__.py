"""asyncinfer: the LLM engine that Python programs await."""

from importlib.metadata import version as _version

from asyncinfer.chunk import (
    Choice,
    Chunk,
    Completion,
    EngineHealth,
    EngineStats,
    LoadProgress,
    Timings,
    TokenLogprob,
    Usage,
)
from asyncinfer.config import EngineConfig
from asyncinfer.engine import Engine, Stream
from asyncinfer.errors import (
    AsyncInferError,
    DeadlineExceeded,
    EngineClosed,
    EngineDead,
    InvalidConfig,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    PluginError,
    RequestFailed,
    StreamBusy,
    StreamStalled,
)
from asyncinfer.params import SamplingParams

__all__ = [
    "AsyncInferError",
    "Choice",
    "Chunk",
    "Completion",
    "DeadlineExceeded",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineHealth",
    "EngineStats",
    "InvalidConfig",
    "InvalidRequest",
    "LoadProgress",
    "ModelLoadError",
    "Overloaded",
    "PluginError",
    "RequestFailed",
    "SamplingParams",
    "Stream",
    "StreamBusy",
    "StreamStalled",
    "Timings",
    "TokenLogprob",
    "Usage",
]

__version__ = _version("asyncinfer")
