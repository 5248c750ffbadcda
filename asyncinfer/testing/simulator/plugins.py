"""Plugins that misbehave: what must cost their own requests at most, and never the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from asyncinfer.cache import LRU
from asyncinfer.config import EngineConfig
from asyncinfer.protocols import CachedBlock, EvictionPolicy, RequestView, SchedulingPolicy
from asyncinfer.testing.oracle_proposer import OracleProposer
from asyncinfer.testing.simulator.host import VirtualHost
from asyncinfer.testing.simulator.observers import OBSERVERS
from asyncinfer.testing.simulator.scenario import Scenario
from asyncinfer.testing.simulator.vocabulary import VOCAB

__all__ = ["CACHE_POLICIES", "SCHEDULERS", "Plugins", "config_of"]

#: By option of `EngineConfig`: a name, a name with arguments, or what makes a plugin.
Plugins: TypeAlias = Mapping[str, Any]


class _PausingPolicy(LRU):
    """Others run while it is called, perhaps for long."""

    def __init__(self, host: VirtualHost) -> None:
        super().__init__()
        self._host = host

    def released(self, block: CachedBlock) -> None:
        self._host.point(inside=True)
        super().released(block)


class _RaisingPolicy(LRU):
    """Gives up in the middle."""

    def __init__(self, host: VirtualHost) -> None:
        super().__init__()
        self._calls = 0

    def reused(self, block: CachedBlock) -> None:
        self._calls += 1
        if self._calls > 3:
            raise asyncio.CancelledError
        super().reused(block)


class _LyingPolicy(LRU):
    """Names blocks that are not its own, and some twice."""

    def __init__(self, host: VirtualHost) -> None:
        super().__init__()

    def victims(self, count: int) -> Sequence[int]:
        return [0, 1, 1, *super().victims(count)]


class _PausingScheduler:
    constant = True

    def __init__(self, host: VirtualHost) -> None:
        self._host = host

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        self._host.point(inside=True)
        return (request.arrival,)


class _RaisingScheduler:
    def __init__(self, host: VirtualHost) -> None:
        self._calls = 0

    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        self._calls += 1
        if self._calls > 20:
            raise SystemExit
        return (-request.arrival,)


class _NonsenseScheduler:
    def __init__(self, host: VirtualHost) -> None:
        self._calls = 0

    def rank(self, request: RequestView, now: float) -> Any:
        self._calls += 1
        return (request.arrival,) if self._calls < 9 else (float("nan"), "first")


#: By the name that scenarios have for them.
CACHE_POLICIES: Final[dict[str, Callable[[VirtualHost], EvictionPolicy]]] = {
    "(pausing)": _PausingPolicy,
    "(raising)": _RaisingPolicy,
    "(lying)": _LyingPolicy,
}
SCHEDULERS: Final[dict[str, Callable[[VirtualHost], SchedulingPolicy]]] = {
    "(pausing)": _PausingScheduler,
    "(raising)": _RaisingScheduler,
    "(nonsense)": _NonsenseScheduler,
}


def config_of(scenario: Scenario, plugins: Plugins, host: VirtualHost) -> EngineConfig:
    """The engine's options, with `plugins` in place of the scenario's."""
    config = EngineConfig(
        block_size=scenario.block_size,
        max_running=scenario.max_running,
        max_requests=scenario.max_requests,
        max_step_tokens=scenario.max_step_tokens,
        step_target=scenario.step_target,
        prefix_cache=scenario.prefix_cache,
        cache_policy=_made(CACHE_POLICIES, scenario.cache_policy, host),
        scheduler=_made(SCHEDULERS, scenario.scheduler, host),
        overlap=scenario.overlap,
        stall_timeout=scenario.stall_timeout,
        step_timeout=scenario.step_timeout,
        drain_timeout=scenario.drain_timeout,
        proposers=_proposers(scenario),
        observers=tuple(OBSERVERS[name](host) for name in scenario.observers),
    )
    if scenario.max_held_bytes is not None:
        config = config.replace(max_held_bytes=scenario.max_held_bytes)
    chosen = {}
    for name, plugin in plugins.items():
        # An object of its own for each life: it may keep what it saw.
        chosen[name] = plugin() if callable(plugin) else plugin
        if isinstance(plugin, list):
            chosen[name] = tuple(plugin)
    return config.replace(**chosen)


def _proposers(scenario: Scenario) -> tuple[OracleProposer, ...]:
    if not scenario.wrong_drafts:
        return ()
    return (
        OracleProposer(
            VOCAB,
            eos_every=scenario.eos_every,
            windows=scenario.windows,
            wrong_every=scenario.wrong_drafts,
        ),
    )


def _made(known: Mapping[str, Callable[[VirtualHost], Any]], name: str, host: VirtualHost) -> Any:
    """A misbehaving plugin of the simulation's own, or the name of another."""
    return known[name](host) if name in known else name
