"""Puts an engine together: model source -> runner -> cache -> scheduler -> core."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

from asyncinfer import plugins
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cache import PrefixCache
from asyncinfer.chunk import EngineStats, LoadProgress
from asyncinfer.config import EngineConfig
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.core import Core
from asyncinfer.engine.jobs import answer_of
from asyncinfer.engine.ports import Port
from asyncinfer.engine.source import Loaded, ModelSource, Progress
from asyncinfer.engine.watch import Watch, open_watch
from asyncinfer.errors import EngineClosed, InvalidRequest, ModelLoadError
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Request, Scheduler
from asyncinfer.telemetry import emit
from asyncinfer.text import ChatTemplate, Tokenizer

__all__ = ["Checkpoint", "open_core", "source_of"]


class Checkpoint:
    """A model in the Hugging Face format: a local folder or a hub id."""

    def __init__(self, model: str | Path) -> None:
        self.model = model

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        # Imports torch: engines on other model sources need none.
        from asyncinfer.models.remote_code import tokenizer_code
        from asyncinfer.runner import open_runner
        from asyncinfer.weights import resolve

        folder = resolve(self.model, revision=config.revision)
        tokenizer = Tokenizer.from_folder(folder)
        template = ChatTemplate.from_folder(folder, tokenizer.shield)
        defaults = generation_defaults(folder)
        runner = open_runner(folder, config, tokenizer.vocab_size, progress)
        notes = (*runner.notes, *tokenizer_code(folder))
        return Loaded(runner, tokenizer, template, defaults, notes)


def source_of(model: str | Path | ModelSource | None) -> ModelSource:
    if model is None:
        return Checkpoint(MODEL_PATH)
    if isinstance(model, str | Path):
        return Checkpoint(model)
    if not callable(getattr(model, "load", None)):
        raise TypeError(f"model={model!r}: must be a folder, a hub id or an object with load()")
    return model


def open_core(
    source: ModelSource,
    config: EngineConfig,
    progress: Progress | None,
    admission: Admission,
    ports: dict[object, Port],
    cancelled: Event,
) -> Core:
    """Everything that takes long about opening an engine. `cancelled` stops it half-way."""

    def report(step: LoadProgress) -> None:
        if cancelled.is_set():
            raise EngineClosed("opening the engine was cancelled")
        if progress is not None:
            progress(step)

    loaded = source.load(config, report)
    watch = None
    try:
        if cancelled.is_set():
            raise EngineClosed("opening the engine was cancelled")
        watch = open_watch(config)
        scheduler = open_scheduler(loaded, config, watch)
    except BaseException:
        loaded.runner.close()
        if watch is not None:
            watch.discard()
        raise
    notes = {"notes": loaded.notes} if loaded.notes else {}
    emit("engine_loaded", model=repr(source), blocks=loaded.runner.spec.num_blocks, **notes)
    core = Core(loaded, scheduler, config, admission, ports, watch=watch)
    if watch is not None:
        name = source.model if isinstance(source, Checkpoint) else type(source).__name__
        watch.opened(str(name), _stats_of(core))
    return core


def open_scheduler(loaded: Loaded, config: EngineConfig, watch: Watch | None = None) -> Scheduler:
    """The scheduler and its cache, with the policies the configuration names."""
    spec = loaded.runner.spec
    cache = None
    if config.prefix_cache:
        policy = plugins.cache_policies.resolve(config.cache_policy)
        cache = PrefixCache(
            spec.block_size,
            policy,
            on_fault=_report("asyncinfer.cache_policies"),
            clock=time.monotonic,
        )
    return Scheduler(
        spec,
        policy=plugins.schedulers.resolve(config.scheduler),
        cache=cache,
        on_fault=_report("asyncinfer.schedulers"),
        on_preempt=_tell_preempted(watch),
    )


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Sampling options of `generation_config.json`, read as the hub does: without `do_sample`
    the model is greedy. What is no option of ours (or out of bounds) is left to the caller."""
    path = folder / "generation_config.json"
    try:
        given = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot be read: {error}", file=str(path)) from error
    if not isinstance(given, dict):
        raise ModelLoadError("must hold a JSON object", file=str(path))
    if not given.get("do_sample", False):
        return {"temperature": 0.0}
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    defaults = {name: given[name] for name in names if given.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise ModelLoadError(str(error), file=str(path)) from error
    return defaults


def _tell_preempted(watch: Watch | None) -> Callable[[Request], None]:
    def tell(request: Request) -> None:
        answer = answer_of(request)
        job = answer.job
        emit("request_preempted", job.context, request_id=job.request_id)
        if watch is not None:
            watch.preempted(job, answer.index)

    return tell


def _stats_of(core: Core) -> Callable[[], EngineStats]:
    """Does not keep the core: an observer may hold it for long."""
    there = weakref.ref(core)

    def stats() -> EngineStats:
        its = there()
        return EngineStats() if its is None else its.stats

    return stats


def _report(group: str) -> Callable[[Exception], None]:
    def report(error: Exception) -> None:
        emit("plugin_failed", group=group, error=repr(error))

    return report
