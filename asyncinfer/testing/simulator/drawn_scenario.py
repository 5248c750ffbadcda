"""Draws random scenarios of simulated lives."""

from __future__ import annotations

from random import Random
from typing import Final

from asyncinfer.cache import STATE_WINDOW, steady_pages
from asyncinfer.testing.simulator.plugins import CACHE_POLICIES, SCHEDULERS
from asyncinfer.testing.simulator.scenario import Scenario

__all__ = ["draw_scenario", "draw_state_pages"]

_CACHE_POLICIES: Final = (
    *("arc", "cost-aware", "lfu", "lru", "lru"),
    *("prefix-lhd", "s3-fifo", "tail-first", "ttl"),
    *CACHE_POLICIES,
)
_SCHEDULERS: Final = (*("deadline", "fcfs", "priority") * 3, *SCHEDULERS)
_OBSERVERS: Final = (
    *((), (), ("(watching)",), ("(watching on decode)",)),
    *(("(pausing)", "(watching)"), ("(pausing on decode)", "(watching)")),
    *(("(raising)", "(watching on decode)"), ("(raising on decode)", "(pausing)")),
)


def draw_state_pages(rng: Random, scenario: Scenario) -> int:
    """Pages of states for one request up to a few, if no layer has a window; 0: no layer has a
    state."""
    if scenario.window is not None or rng.random() > 0.1:
        return 0
    least = steady_pages(STATE_WINDOW, scenario.block_size)
    return least + rng.choice((0, 1, 4, 12)) * least // 2


def draw_scenario(rng: Random) -> Scenario:
    """A random scenario without states, samplers and drafts."""
    block_size = rng.choice((1, 2, 4, 4, 8))
    window, pages = None, 0
    if rng.random() < 0.3:
        window = rng.choice((1, 2, 3, 5, 8, 9, 16))
        least = -(-(window - 1) // block_size) + 2
        pages = least + rng.choice((0, 1, 4, 12)) * least // 2
    return Scenario(
        blocks=rng.randint(24, 160) // block_size,
        block_size=block_size,
        max_context=rng.choice((24, 40, 64, 96)),
        max_running=rng.randint(1, 6),
        max_requests=rng.choice((4, 12, 64)),
        max_held_bytes=rng.choice((None, None, None, 8_000, 60_000)),
        max_step_tokens=rng.choice((1, 3, 8, 16, 32)),
        overlap=rng.choice((1, 1, 2, 3, 4)),
        window=window,
        window_pages=pages,
        eos_every=rng.choice((None, None, 9, 25)),
        prefix_cache=rng.random() < 0.9,
        cache_policy=rng.choice(_CACHE_POLICIES),
        scheduler=rng.choice(_SCHEDULERS),
        observers=list(rng.choice(_OBSERVERS)),
        stall_timeout=rng.choice((1.5, 5.0)),
        step_timeout=rng.choice((3.0, 3.0, 30.0)),
        step_seconds=rng.choice((0.001, 0.01, 0.1)),
        loops=rng.choice((1, 1, 2)),
        load_points=rng.choice((0, 2)),
        adapters=rng.choice((1, 2, 4)) if rng.random() < 0.2 else None,
    )
