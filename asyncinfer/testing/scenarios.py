"""Random lives of a scheduler, one per seed: `simulate_scheduler(seed)` drives a `Simulation`
through arrivals, cancels, pauses, failures and lack of memory and checks everything on the way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from random import Random

from asyncinfer.cache import STATE_WINDOW, Conversation, KVGroupSpec, PrefixCache, steady_pages
from asyncinfer.errors import InvalidRequest
from asyncinfer.params import SamplingParams
from asyncinfer.protocols.eviction import EvictionPolicy
from asyncinfer.scheduler import FCFS, Deadline, Priority, RunnerSpec, Step
from asyncinfer.testing.invariants import check_drained, hold
from asyncinfer.testing.oracle import EOS_ID, windows_of
from asyncinfer.testing.oracle_proposer import OracleProposer
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
    # A generator of its own, so that lives without windows stay as they were.
    sim = _world(rng, Random(-1 - seed), Random(f"states {seed}"), seen, eviction)
    # And worlds without conversations.
    talking = _Talking(sim, Random(-2 - seed), seen)
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(30)] for _ in range(3)]
    rate = rng.choice((0.2, 0.5, 0.9))
    for _ in range(steps):
        if rng.random() < rate and len(sim.live()) < most_live:
            _submit(sim, rng, prefixes, seen, talking.pick())
        talking.go_on()
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
    talking.end()
    scheduler, counters = sim.scheduler, sim.scheduler.counters
    seen.update(asdict(counters))
    states = scheduler.spec.groups[-1].state
    if len(scheduler.spec.groups) > 1 and not states:
        seen.update(
            windowed_tokens=counters.generated_tokens,
            windowed_hits=counters.cached_tokens,
            windowed_forks=counters.forks,
            windowed_preemptions=counters.preemptions,
        )
    if states:
        seen.update(
            state_tokens=counters.generated_tokens,
            state_hits=counters.cached_tokens,
            state_forks=counters.forks,
            state_preemptions=counters.preemptions,
        )
    for one in scheduler.speculator.counters.methods.values():
        seen.update(accepted=sum(one.accepted), rejected=sum(one.rejected))
    return seen


def _windows(rng: Random, block_size: int) -> list[KVGroupSpec]:
    """Groups with a window, each with pages for one request to a few; or none."""
    groups: list[KVGroupSpec] = []
    while len(groups) < 3 and rng.random() > 0.5:
        window = rng.choice((1, 2, 3, 5, 8, 9, 16))
        least = steady_pages(window, block_size)
        groups.append(KVGroupSpec(least + rng.choice((0, 1, 4, 12)) * least // 2, window))
    return groups


def _states(rng: Random, block_size: int) -> list[KVGroupSpec]:
    """A group with a state, with pages for one request to a few; or none."""
    if rng.random() > 0.3:
        return []
    least = steady_pages(STATE_WINDOW, block_size)
    pages = least + rng.choice((0, 1, 4, 12)) * least // 2
    return [KVGroupSpec(pages, STATE_WINDOW, state=True)]


def _world(
    rng: Random,
    windows: Random,
    states: Random,
    seen: Counter[str],
    eviction: EvictionPolicy | None,
) -> Simulation:
    block_size = rng.choice((1, 2, 4, 4, 8))
    spec = RunnerSpec(
        groups=(
            KVGroupSpec(rng.randint(24, 160) // block_size),
            *(_windows(windows, block_size) or _states(states, block_size)),
        ),
        block_size=block_size,
        max_slots=rng.randint(1, 6),
        max_context=rng.choice((24, 40, 64)),
        vocab_size=VOCAB,
        max_step_tokens=rng.choice((1, 3, 8, 16, 32)),
        drafts=True,
    )
    policy = rng.choice((FCFS(), Priority(ageing=1.0), Deadline(patience=2.0)))
    cached = rng.random() < 0.9
    flaky = rng.random() < 0.2

    def failing(step: Step) -> Mapping[int, Exception]:
        if not flaky or rng.random() > 0.03:
            return {}
        seen["failures"] += 1
        return {rng.randrange(len(step.slots)): ArithmeticError("NaN logits")}

    cramped = rng.random() < 0.2

    def no_room(step: Step) -> bool:
        if not cramped or rng.random() > 0.05:
            return False
        seen["retractions"] += 1
        return True

    depth, eos_every = rng.choice((1, 1, 2, 3)), rng.choice((None, None, 9, 25))
    drafting = windows.random() < 0.4
    proposer = OracleProposer(
        VOCAB,
        eos_every=eos_every,
        windows=windows_of(spec.groups),
        wrong_every=windows.choice((2, 4, 30)),
    )
    return Simulation(
        spec,
        policy=policy,
        cache=PrefixCache(block_size, eviction, secret=b"simulation") if cached else None,
        depth=depth,
        eos_every=eos_every,
        proposer=proposer if drafting else None,
        failing=failing,
        no_room=no_room,
    )


class _Talking:
    """Conversations that begin, fork, call tools and end, in half of all lives."""

    def __init__(self, sim: Simulation, rng: Random, seen: Counter[str]) -> None:
        self._sim = sim
        self._rng = rng
        self._seen = seen
        self._open: list[Conversation] = []
        self._talks = sim.scheduler.cache is not None and rng.random() < 0.5

    def pick(self) -> Conversation | None:
        """Whose request the next one is."""
        rng = self._rng
        if not self._talks or rng.random() < 0.3:
            return None
        if not self._open or (len(self._open) < 5 and rng.random() < 0.3):
            self._open.append(Conversation(rng.choice((math.inf, 0.3, 2.0))))
            self._seen["conversations"] += 1
        return rng.choice(self._open)

    def go_on(self) -> None:
        """Perhaps something becomes of one of them."""
        rng, sim = self._rng, self._sim
        if not self._open:
            return
        one, roll = rng.choice(self._open), rng.random()
        if roll < 0.1:
            sim.converse("waiting", one)
        elif roll < 0.15:
            made = Conversation()
            self._open.append(made)
            sim.converse("fork", (one, made))
        elif roll < 0.2:
            # Requests of it may be under way.
            self._open.remove(one)
            sim.converse("over", one)
        cache = sim.scheduler.cache
        assert cache is not None
        self._seen["pinned"] += cache.conversations.pinned_blocks > 0

    def end(self) -> None:
        """All are over: no pin is left."""
        for one in self._open:
            self._sim.converse("over", one)
        cache = self._sim.scheduler.cache
        if cache is not None:
            hold("I14", not cache.conversations.pinned_blocks, "pins are left")
            hold("I14", not cache.conversations.open, "conversations are left")
        check_drained(self._sim.scheduler)


def _submit(
    sim: Simulation,
    rng: Random,
    prefixes: list[list[int]],
    seen: Counter[str],
    conversation: Conversation | None,
) -> None:
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
            conversation=conversation,
        )
        seen["requests"] += 1
    except InvalidRequest:
        seen["refused"] += 1
