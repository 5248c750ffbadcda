"""The engine: `Engine`, `Stream`, and the decode loop behind them."""

from asyncinfer.engine.adapters import Adapters
from asyncinfer.engine.embedding import Embeddings, Score
from asyncinfer.engine.engine import Engine
from asyncinfer.engine.engine_tokenizer import EngineTokenizer
from asyncinfer.engine.hold import Hold, Keeper, Pin, check_ttl
from asyncinfer.engine.model_info import ModelInfo
from asyncinfer.engine.session import Session, SessionStream, open_session
from asyncinfer.engine.source import Loaded, ModelSource
from asyncinfer.engine.spoken import Answered, SpokenMessages
from asyncinfer.engine.stream import Stream
from asyncinfer.engine.sync_engine import SyncEngine
from asyncinfer.engine.sync_session import SyncSession
from asyncinfer.engine.sync_stream import SyncStream

__all__ = [
    "Adapters",
    "Answered",
    "Embeddings",
    "Engine",
    "EngineTokenizer",
    "Hold",
    "Keeper",
    "Loaded",
    "ModelInfo",
    "ModelSource",
    "Pin",
    "Score",
    "Session",
    "SessionStream",
    "SpokenMessages",
    "Stream",
    "SyncEngine",
    "SyncSession",
    "SyncStream",
    "check_ttl",
    "open_session",
]
