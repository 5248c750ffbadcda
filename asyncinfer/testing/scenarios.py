"""Random lives of a scheduler, one per seed: `simulate_scheduler(seed)` drives a `Simulation`
through arrivals, cancels, pauses, failures and lack of memory and checks everything on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from random import Random

from asyncinfer.cache import KVGroupSpec, PrefixCache, steady_pages
from asyncinfer.errors import InvalidRequest
from asyncinfer.params import SamplingParams
from asyncinfer.protocols.eviction import EvictionPolicy
from asyncinfer.scheduler import FCFS, Deadline, Priority, RunnerSpec, Step
from asyncinfer.testing.oracle import EOS_ID
from asyncinfer.testing.simulation import Simulation

__all__ = ["simulate_scheduler"]

VOCAB = 50


def simulate_scheduler(
    seed: int,
    steps: int = 120,
    *,
    eviction: EvictionPolicy | None = None,
    most_live: int = 12,
) -> Counter[str]:
    """One random life of so many steps, then a drain. Returns what happened in it.

    Raises:
        InvariantError: something that must hold does not.
    """
    rng = Random(seed)
    seen = Counter[str]()
    # Numbers of its own: worlds without windows stay as they were.
    sim = _world(rng, Random(-1 - seed), seen, eviction)
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(30)] for _ in range(3)]
    rate = rng.choice((0.2, 0.5, 0.9))
    for _ in range(steps):
        if rng.random() < rate and len(sim.live()) < most_live:
            _submit(sim, rng, prefixes, seen)
        live = sim.live()
        if live and rng.random() < 0.04:
            sim.abort(rng.choice(live))
            seen["aborts"] += 1
        if live and rng.random() < 0.12:
            sim.pause(rng.choice(live))
            seen["pauses"] += 1
        if live and rng.random() < 0.12:
            sim.resume(rng.choice(live))
        sim.step(dt=rng.choice((0.01, 0.01, 0.5)))
        sim.forget()
    sim.drain()
    scheduler, counters = sim.scheduler, sim.scheduler.counters
    seen.update(asdict(counters))
    if len(scheduler.spec.groups) > 1:
        seen.update(
            windowed_tokens=counters.generated_tokens,
            windowed_hits=counters.cached_tokens,
            windowed_forks=counters.forks,
            windowed_preemptions=counters.preemptions,
        )
    return seen


def _windows(rng: Random, block_size: int) -> list[KVGroupSpec]:
    """Groups with a window, each with pages for one request to a few; or none."""
    groups: list[KVGroupSpec] = []
    while len(groups) < 3 and rng.random() > 0.5:
        window = rng.choice((1, 2, 3, 5, 8, 9, 16))
        least = steady_pages(window, block_size)
        groups.append(KVGroupSpec(least + rng.choice((0, 1, 4, 12)) * least // 2, window))
    return groups


def _world(
    rng: Random, windows: Random, seen: Counter[str], eviction: EvictionPolicy | None
) -> Simulation:
    block_size = rng.choice((1, 2, 4, 4, 8))
    spec = RunnerSpec(
        groups=(
            KVGroupSpec(rng.randint(24, 160) // block_size),
            *_windows(windows, block_size),
        ),
        block_size=block_size,
        max_slots=rng.randint(1, 6),
        max_context=rng.choice((24, 40, 64)),
        vocab_size=VOCAB,
        max_step_tokens=rng.choice((1, 3, 8, 16, 32)),
    )
    policy = rng.choice((FCFS(), Priority(ageing=1.0), Deadline(patience=2.0)))
    cached = rng.random() < 0.9
    flaky = rng.random() < 0.2

    def failing(plan: Step) -> Mapping[int, Exception]:
        if not flaky or rng.random() > 0.03:
            return {}
        seen["failures"] += 1
        return {rng.randrange(len(plan.slots)): ArithmeticError("NaN logits")}

    cramped = rng.random() < 0.2

    def no_room(plan: Step) -> bool:
        if not cramped or rng.random() > 0.05:
            return False
        seen["retractions"] += 1
        return True

    return Simulation(
        spec,
        policy=policy,
        cache=PrefixCache(block_size, eviction, secret=b"simulation") if cached else None,
        depth=rng.choice((1, 1, 2, 3)),
        eos_every=rng.choice((None, None, 9, 25)),
        failing=failing,
        no_room=no_room,
    )


def _submit(sim: Simulation, rng: Random, prefixes: list[list[int]], seen: Counter[str]) -> None:
    prefix = rng.choice(prefixes)[: rng.randrange(30)]
    suffix = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(0 if prefix else 1, 8))]
    params = SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        max_tokens=rng.choice((None, 1, 2, 8, 30)),
        min_tokens=rng.choice((0, 0, 1)),
        n=rng.choice((1, 1, 1, 2, 3)),
        prompt_logprobs=rng.choice((None, None, None, 0)),
    )
    try:
        sim.submit(
            prefix + suffix,
            params,
            seed=rng.randrange(2**32),
            scope=rng.choice(("", "", "other")),
            priority=rng.randrange(3),
            deadline=rng.choice((None, sim.now + rng.random())),
            stop_ids=frozenset((EOS_ID,)),
        )
        seen["requests"] += 1
    except InvalidRequest:
        seen["refused"] += 1
