"""asyncinfer: the LLM engine that Python programs await."""

from importlib.metadata import version as _version

from asyncinfer.chunk import (
    Choice,
    Chunk,
    Completion,
    Timings,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from asyncinfer.clients import (
    anthropic_client,
    openai_client,
    sync_anthropic_client,
    sync_openai_client,
)
from asyncinfer.config import EngineConfig
from asyncinfer.engine import (
    Adapters,
    Embeddings,
    Engine,
    EngineTokenizer,
    ModelInfo,
    Pin,
    Score,
    Session,
    SessionStream,
    Stream,
    SyncEngine,
    SyncSession,
    SyncStream,
)
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
from asyncinfer.stats import (
    AdapterInfo,
    DraftStats,
    EngineHealth,
    EngineStats,
    Fallback,
    LoadProgress,
)

__all__ = [
    "AdapterInfo",
    "Adapters",
    "AsyncInferError",
    "Choice",
    "Chunk",
    "Completion",
    "DeadlineExceeded",
    "DraftStats",
    "Embeddings",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineHealth",
    "EngineStats",
    "EngineTokenizer",
    "Fallback",
    "InvalidConfig",
    "InvalidRequest",
    "LoadProgress",
    "ModelInfo",
    "ModelLoadError",
    "Overloaded",
    "Pin",
    "PluginError",
    "RequestFailed",
    "SamplingParams",
    "Score",
    "Session",
    "SessionStream",
    "Stream",
    "StreamBusy",
    "StreamStalled",
    "SyncEngine",
    "SyncSession",
    "SyncStream",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "anthropic_client",
    "openai_client",
    "sync_anthropic_client",
    "sync_openai_client",
]

__version__ = _version("asyncinfer")
