"""`SimulatedEngine`: an `Engine` on a `VirtualHost`, and what checks may look at of it."""

from __future__ import annotations

from asyncinfer.config import EngineConfig
from asyncinfer.engine import Engine, ModelSource
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.core import Core
from asyncinfer.runtime import Runtime

__all__ = ["SimulatedEngine"]


class SimulatedEngine(Engine):
    """The engine as it is, with time and threads from elsewhere."""

    def __init__(self, runtime: Runtime, model: ModelSource, config: EngineConfig) -> None:
        self._runtime = runtime
        super().__init__(model, config=config)

    @property
    def core(self) -> Core | None:
        """None until it is open."""
        return self._frontend.core

    @property
    def admission(self) -> Admission:
        return self._admission
