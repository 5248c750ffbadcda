"""Puts an engine together: model source -> runner -> cache -> scheduler -> core."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Event

from asyncinfer import plugins
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cache import PrefixCache
from asyncinfer.chunk import EngineStats, LoadProgress
from asyncinfer.config import EngineConfig
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.core import Core
from asyncinfer.engine.defaults import generation_defaults
from asyncinfer.engine.engine_events import EngineEvents, open_events
from asyncinfer.engine.jobs import output_of
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.source import Loaded, ModelSource, Progress
from asyncinfer.errors import EngineClosed
from asyncinfer.plugins.chosen import chosen_name
from asyncinfer.scheduler import Scheduler, Sequence
from asyncinfer.telemetry import emit, plugin_reporter
from asyncinfer.text import ChatTemplate, Tokenizer

__all__ = ["CheckpointSource", "open_core", "source_of"]


class CheckpointSource:
    """A checkpoint: a local folder or GGUF file, a hub id, or the name of a model we know."""

    def __init__(self, model: str | Path) -> None:
        self.model = model

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        # Imports torch: engines on other model sources need none.
        from asyncinfer.engine.gguf import load_gguf
        from asyncinfer.models.remote_code import tokenizer_code
        from asyncinfer.runner import open_runner
        from asyncinfer.weights import following_links, resolve
        from asyncinfer.weights.gguf import is_gguf

        path = resolve(self.model, revision=config.revision)
        if is_gguf(path):
            return load_gguf(path, config, progress)
        # What is on the hub was made by anybody.
        local = os.path.isdir(os.path.expanduser(self.model))
        with following_links(local and config.follow_symlinks):
            tokenizer = Tokenizer.from_folder(path)
            template = ChatTemplate.from_folder(path, tokenizer.shield)
            defaults = generation_defaults(path)
            runner = open_runner(path, config, tokenizer.vocab_size, progress)
            notes = (*runner.notes, *tokenizer_code(path), *template.notes)
        return Loaded(runner, tokenizer, template, defaults, notes)


def source_of(model: str | Path | ModelSource | None) -> ModelSource:
    if model is None:
        return CheckpointSource(MODEL_PATH)
    if isinstance(model, str | Path):
        return CheckpointSource(model)
    if not callable(getattr(model, "load", None)):
        raise TypeError(f"model={model!r}: must be a folder, a hub id or an object with load()")
    return model


def open_core(
    source: ModelSource,
    config: EngineConfig,
    progress: Progress | None,
    admission: Admission,
    bridges: dict[object, LoopBridge],
    clock: Callable[[], float],
    cancelled: Event,
) -> Core:
    """Everything that takes long about opening an engine. `cancelled` stops it half-way."""

    def report(step: LoadProgress) -> None:
        if cancelled.is_set():
            raise EngineClosed("opening the engine was cancelled")
        if progress is not None:
            progress(step)

    _report_ignored()
    # Before a model is loaded, which may take minutes.
    events, loaded = open_events(config), None
    faults: list[str] = []
    try:
        _check_policies(config)
        loaded = source.load(config, report)
        if cancelled.is_set():
            raise EngineClosed("opening the engine was cancelled")
        scheduler = open_scheduler(loaded, config, events, clock, faults)
        core = Core(loaded, scheduler, config, admission, bridges, clock, events, faults)
        notes = {"notes": loaded.notes} if loaded.notes else {}
        emit("engine_loaded", model=repr(source), blocks=loaded.runner.spec.num_blocks, **notes)
        if events is not None:
            name = source.model if isinstance(source, CheckpointSource) else type(source).__name__
            events.opened(str(name), _stats_of(core))
    except BaseException:
        if loaded is not None:
            loaded.runner.close()
        if events is not None:
            events.discard()
        raise
    return core


def open_scheduler(
    loaded: Loaded,
    config: EngineConfig,
    events: EngineEvents | None = None,
    clock: Callable[[], float] = time.monotonic,
    faults: list[str] | None = None,
) -> Scheduler:
    """The scheduler and its cache, with the policies the configuration names; what goes wrong with
    those is added to `faults`."""
    told = [] if faults is None else faults
    spec = loaded.runner.spec
    cache = None
    if config.prefix_cache:
        eviction, label = plugins.cache_policies.choose(config.cache_policy)
        cache = PrefixCache(
            spec.block_size,
            eviction,
            on_fault=plugin_reporter("asyncinfer.cache_policies", told),
            clock=clock,
            label=label,
        )
    scheduling, label = plugins.schedulers.choose(config.scheduler)
    return Scheduler(
        spec,
        policy=scheduling,
        cache=cache,
        on_fault=plugin_reporter("asyncinfer.schedulers", told),
        on_preempt=_tell_preempted(events),
        clock=clock,
        label=label,
    )


def _check_policies(config: EngineConfig) -> None:
    """Raise `PluginError` for a name that nobody has and arguments that nobody takes."""
    if (named := chosen_name(config.scheduler)) is not None:
        plugins.schedulers.check(*named)
    if config.prefix_cache and (named := chosen_name(config.cache_policy)) is not None:
        plugins.cache_policies.check(*named)


def _report_ignored() -> None:
    """An installed plugin that nobody can use has been meant for something."""
    for info in plugins.ignored():
        emit(
            "plugin_ignored",
            group=info.group,
            name=info.name,
            origin=info.origin,
            reason=info.problem,
        )


def _tell_preempted(events: EngineEvents | None) -> Callable[[Sequence], None]:
    def tell(request: Sequence) -> None:
        output = output_of(request)
        job = output.job
        emit("request_preempted", job.context, request_id=job.request_id)
        if events is not None:
            events.preempted(job, output.index)

    return tell


def _stats_of(core: Core) -> Callable[[], EngineStats]:
    """Does not keep the core: an observer may hold it for long."""
    there = weakref.ref(core)

    def stats() -> EngineStats:
        core = there()
        return EngineStats() if core is None else core.snapshot()

    return stats
