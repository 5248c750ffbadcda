"""The engine: `Engine`, `Stream`, and the decode loop behind them."""

from asyncinfer.engine.engine import Engine
from asyncinfer.engine.source import Loaded, ModelSource
from asyncinfer.engine.stream import Stream

__all__ = ["Engine", "Loaded", "ModelSource", "Stream"]
