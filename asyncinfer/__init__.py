"""asyncinfer: the LLM engine that Python programs await."""

from typing import TYPE_CHECKING

from asyncinfer.lazy import hand_on

if TYPE_CHECKING:
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

    __version__: str
else:
    # An engine and what it stands on take long to import. Who asks for help or for a number of the
    # version does not wait for them.
    __getattr__, __dir__ = hand_on(
        __name__,
        chunk=(
            "Choice",
            "Chunk",
            "Completion",
            "Timings",
            "TokenLogprob",
            "ToolCall",
            "ToolCallDelta",
            "Usage",
        ),
        clients=(
            "anthropic_client",
            "openai_client",
            "sync_anthropic_client",
            "sync_openai_client",
        ),
        config=("EngineConfig",),
        engine=(
            "Adapters",
            "Embeddings",
            "Engine",
            "EngineTokenizer",
            "ModelInfo",
            "Pin",
            "Score",
            "Session",
            "SessionStream",
            "Stream",
            "SyncEngine",
            "SyncSession",
            "SyncStream",
        ),
        errors=(
            "AsyncInferError",
            "DeadlineExceeded",
            "EngineClosed",
            "EngineDead",
            "InvalidConfig",
            "InvalidRequest",
            "ModelLoadError",
            "Overloaded",
            "PluginError",
            "RequestFailed",
            "StreamBusy",
            "StreamStalled",
        ),
        params=("SamplingParams",),
        stats=(
            "AdapterInfo",
            "DraftStats",
            "EngineHealth",
            "EngineStats",
            "Fallback",
            "LoadProgress",
        ),
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
