"""`ClockedModel`: counts the CPU time of a model's runner, where it runs."""

from __future__ import annotations

import time
from dataclasses import replace

from asyncinfer.config import EngineConfig
from asyncinfer.engine import Loaded, ModelSource
from asyncinfer.engine.source import Progress
from asyncinfer.scheduler import RunnerSpec, Step, StepResult, StepRunner

__all__ = ["ClockedModel"]


class ClockedModel:
    """A model with a clock on every call of its runner.

    The runner is timed where it runs, because the engine's own work empties the processor's caches:
    the same steps by themselves take less than half the time.
    """

    def __init__(self, model: ModelSource) -> None:
        self._model = model
        #: CPU seconds of the decode thread within the runner so far; waiting takes none.
        self.seconds = 0.0

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        loaded = self._model.load(config, progress)
        return replace(loaded, runner=_ClockedRunner(loaded.runner, self))


class _ClockedRunner:
    def __init__(self, runner: StepRunner, model: ClockedModel) -> None:
        self._runner = runner
        self._model = model

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def launch(self, step: Step) -> object:
        began = time.thread_time()
        handle = self._runner.launch(step)
        self._model.seconds += time.thread_time() - began
        return handle

    def prepare(self) -> bool:
        return self._runner.prepare()

    def collect(self, handle: object) -> StepResult:
        began = time.thread_time()
        result = self._runner.collect(handle)
        self._model.seconds += time.thread_time() - began
        return result

    def close(self) -> None:
        self._runner.close()
