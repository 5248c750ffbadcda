"""asyncinfer: the LLM engine that Python programs await."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from asyncinfer.chunk import (
    Choice,
    Chunk,
    Completion,
    EngineStats,
    LoadProgress,
    Timings,
    TokenLogprob,
    Usage,
)
from asyncinfer.config import EngineConfig
from asyncinfer.errors import (
    AsyncInferError,
    DeadlineExceeded,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    PluginError,
    RequestFailed,
    StreamBusy,
    StreamStalled,
)
from asyncinfer.params import SamplingParams

if _TYPE_CHECKING:
    from asyncinfer.engine import Engine, Stream

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
    "EngineStats",
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


def __getattr__(name: str) -> _Any:
    # The engine imports torch, which takes a second: only for those who use it.
    if name in ("Engine", "Stream"):
        from asyncinfer import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
