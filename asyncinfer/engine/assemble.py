"""Puts an engine together: model source -> runner -> cache -> scheduler -> core."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from asyncinfer import plugins
from asyncinfer.builtin import EMBEDDED, MODEL_PATH
from asyncinfer.cache import PrefixCache
from asyncinfer.config import PREDICTOR, EngineConfig
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.checkpoint import CheckpointSource
from asyncinfer.engine.core import Core
from asyncinfer.engine.draft import check_vocabulary, open_draft
from asyncinfer.engine.engine_events import EngineEvents, open_events
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.request import output_of
from asyncinfer.engine.source import Loaded, ModelSource, Progress
from asyncinfer.errors import InvalidConfig
from asyncinfer.plugins.chosen import chosen_name
from asyncinfer.runtime import Runtime, cancellable
from asyncinfer.scheduler import DraftModel, Scheduler, Sequence
from asyncinfer.speculation import GuardedProposer, Speculator
from asyncinfer.stats import EngineStats, LoadProgress
from asyncinfer.telemetry import emit, plugin_reporter

__all__ = ["open_core", "open_scheduler", "source_of"]


def source_of(model: str | Path | ModelSource | None) -> ModelSource:
    if model is None or model == EMBEDDED:
        return CheckpointSource(MODEL_PATH)
    if isinstance(model, str | Path):
        return CheckpointSource(model)
    if isinstance(model, type) or not callable(getattr(model, "load", None)):
        raise TypeError(f"model={model!r}: must be a folder, a hub id or an object with load()")
    return model


def open_core(
    source: ModelSource,
    config: EngineConfig,
    progress: Progress | None,
    admission: Admission,
    bridges: dict[object, LoopBridge],
    runtime: Runtime,
    check_cancelled: Callable[[], None],
) -> Core:
    """Load the model and build the core: all of opening that takes long. `check_cancelled` is asked
    between its parts, and later between the layers of a step; what it raises ends them."""

    def report(step: LoadProgress) -> None:
        check_cancelled()
        if progress is not None:
            progress(step)

    _report_ignored()
    # Checked before a model is loaded, which may take minutes.
    events, loaded, draft = open_events(config, runtime), None, None
    faults: list[str] = []
    try:
        _check_policies(config)
        with cancellable(check_cancelled):
            draft = open_draft(source, config, report)
            # A head is loaded together with its model; a model that drafts has been loaded already.
            loaded = source.load(config if draft is None else config.replace(draft=None), report)
        check_cancelled()
        scheduler = open_scheduler(loaded, config, events, runtime.clock, faults, draft)
        core = Core(loaded, scheduler, config, admission, bridges, runtime.clock, events, faults)
        notes = {"notes": loaded.notes} if loaded.notes else {}
        name = str(source.model if isinstance(source, CheckpointSource) else type(source).__name__)
        emit("engine_loaded", model=name, blocks=loaded.runner.spec.num_blocks, **notes)
        if events is not None:
            events.opened(name, _stats_of(core))
    except BaseException:
        for each in (loaded, draft):
            if each is not None:
                # The caller hears why opening failed, not what closing half of an engine raised.
                with suppress(Exception):
                    each.runner.close()
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
    draft: Loaded | None = None,
) -> Scheduler:
    """The scheduler and its cache, with the policies the configuration names; what goes wrong with
    those is added to `faults`. Raises `InvalidConfig` for a draft model of another vocabulary."""
    faults = [] if faults is None else faults
    spec = loaded.runner.spec
    cache = None
    # Where tokens attend to later tokens, no two prompts share the KV of a prefix.
    if config.prefix_cache and not spec.whole_prompts:
        eviction, label = plugins.cache_policies.choose(config.cache_policy)
        cache = PrefixCache(
            spec.block_size,
            eviction,
            secret=config.prefix_secret,
            on_fault=plugin_reporter("asyncinfer.cache_policies", faults),
            clock=clock,
            label=label,
            pinned_share=config.pinned_share,
        )
    scheduling, label = plugins.schedulers.choose(config.scheduler)
    return Scheduler(
        spec,
        policy=scheduling,
        cache=cache,
        on_fault=plugin_reporter("asyncinfer.schedulers", faults),
        on_preempt=_tell_preempted(events),
        clock=clock,
        label=label,
        speculator=open_speculator(loaded, config, clock, faults, draft),
    )


def open_speculator(
    loaded: Loaded,
    config: EngineConfig,
    clock: Callable[[], float],
    faults: list[str],
    draft: Loaded | None,
) -> Speculator:
    """The speculator, with the proposers that the configuration names, and the draft model."""
    guarded = []
    for entry in config.proposers:
        proposer, label = plugins.proposers.choose(entry)
        named = chosen_name(entry)
        guarded.append(
            GuardedProposer(
                proposer,
                type(proposer).__name__ if named is None else named[0],
                label,
                vocab_size=loaded.runner.spec.vocab_size,
                report=plugin_reporter("asyncinfer.proposers", faults),
                clock=clock,
            )
        )
    if config.draft == PREDICTOR and not loaded.runner.spec.predicts:
        bound = "needs a model with a layer that predicts further tokens"
        raise InvalidConfig("draft", config.draft, bound)
    if draft is None:
        return Speculator(guarded)
    check_vocabulary(config.draft, loaded.tokenizer, draft.tokenizer)
    cache = PrefixCache(draft.runner.spec.block_size) if config.prefix_cache else None
    return Speculator(guarded, DraftModel(draft.runner, cache))


def _check_policies(config: EngineConfig) -> None:
    """Raise `PluginError` for a name that nobody has and arguments that nobody takes."""
    if (named := chosen_name(config.scheduler)) is not None:
        plugins.schedulers.check(*named)
    for entry in config.proposers:
        if (named := chosen_name(entry)) is not None:
            plugins.proposers.check(*named)
    if config.prefix_cache and (named := chosen_name(config.cache_policy)) is not None:
        plugins.cache_policies.check(*named)


def _report_ignored() -> None:
    """Report installed plugins that cannot be used, since somebody installed them for a purpose."""
    for info in plugins.ignored():
        emit(
            "plugin_ignored",
            group=info.group,
            name=info.name,
            origin=info.origin,
            reason=info.problem,
        )


def _tell_preempted(events: EngineEvents | None) -> Callable[[Sequence], None]:
    def tell(sequence: Sequence) -> None:
        output = output_of(sequence)
        request = output.request
        emit("request_preempted", request.context, request_id=request.id)
        if events is not None:
            events.preempted(request, output.index)

    return tell


def _stats_of(core: Core) -> Callable[[], EngineStats]:
    """`core.snapshot` without a reference to the core, since an observer may keep it for long."""
    there = weakref.ref(core)

    def stats() -> EngineStats:
        core = there()
        return EngineStats() if core is None else core.snapshot()

    return stats
