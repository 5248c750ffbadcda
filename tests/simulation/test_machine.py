"""A hypothesis state machine over the same simulation: it shrinks what it finds."""

from __future__ import annotations

from typing import Any

import pytest
from fuzzing import FACTOR
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from asyncinfer.cache import KVGroupSpec, PrefixCache, steady_pages
from asyncinfer.errors import InvalidRequest
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import FCFS, Deadline, Priority, RunnerSpec
from asyncinfer.testing.oracle import EOS_ID
from asyncinfer.testing.simulation import Simulation, Track

POLICIES = (FCFS(), Priority(ageing=1.0), Deadline(patience=2.0))
#: Few tokens and few prefixes, so that requests share them.
PREFIXES = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9], [5])


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever is done in whatever order, the invariants hold and tokens are the oracle's."""

    @initialize(
        block_size=st.sampled_from((1, 2, 4)),
        tokens=st.integers(8, 48),
        slots=st.integers(1, 4),
        budget=st.sampled_from((1, 3, 16)),
        depth=st.integers(1, 3),
        policy=st.sampled_from(POLICIES),
        cached=st.booleans(),
        windows=st.lists(st.sampled_from((1, 3, 6)), max_size=2),
        more_pages=st.integers(0, 8),
    )
    def open(
        self,
        block_size: int,
        tokens: int,
        slots: int,
        budget: int,
        depth: int,
        policy: Any,
        cached: bool,
        windows: list[int],
        more_pages: int,
    ) -> None:
        groups = [KVGroupSpec(tokens // block_size)]
        groups += [
            KVGroupSpec(steady_pages(window, block_size) + more_pages, window) for window in windows
        ]
        spec = RunnerSpec(
            groups=tuple(groups),
            block_size=block_size,
            max_slots=slots,
            max_context=24,
            vocab_size=12,
            max_step_tokens=budget,
        )
        cache = PrefixCache(block_size, secret=b"machine") if cached else None
        self.sim = Simulation(spec, policy=policy, cache=cache, depth=depth, eos_every=11)
        self.answers: list[Track] = []

    @rule(
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, 9),
        suffix=st.lists(st.integers(1, 3), max_size=3),
        max_tokens=st.sampled_from((None, 1, 2, 9)),
        n=st.integers(1, 3),
        scored=st.booleans(),
        scope=st.sampled_from(("", "other")),
        priority=st.integers(0, 2),
    )
    def submit(
        self,
        prefix: list[int],
        length: int,
        suffix: list[int],
        max_tokens: int | None,
        n: int,
        scored: bool,
        scope: str,
        priority: int,
    ) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, n=n, prompt_logprobs=0 if scored else None
        )
        try:
            self.answers += self.sim.submit(
                prefix[:length] + suffix,
                params,
                scope=scope,
                priority=priority,
                stop_ids=frozenset((EOS_ID,)),
            )
        except InvalidRequest:
            return

    @precondition(lambda self: self.answers)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        # Ended ones too: finishing twice changes nothing.
        self.sim.abort(self.answers[which % len(self.answers)])

    @precondition(lambda self: self.answers)
    @rule(which=st.integers(0, 1000))
    def pause(self, which: int) -> None:
        self.sim.pause(self.answers[which % len(self.answers)])

    @precondition(lambda self: self.answers)
    @rule(which=st.integers(0, 1000))
    def resume(self, which: int) -> None:
        self.sim.resume(self.answers[which % len(self.answers)])

    @precondition(lambda self: len(self.sim.scheduler.in_flight) < self.sim.depth)
    @rule()
    def schedule(self) -> None:
        self.sim.schedule()

    @precondition(lambda self: self.sim.scheduler.in_flight)
    @rule()
    def update(self) -> None:
        self.sim.update()

    @rule(turns=st.integers(1, 6), dt=st.sampled_from((0.01, 1.0)))
    def turn(self, turns: int, dt: float) -> None:
        for _ in range(turns):
            self.sim.step(dt)

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain()


@pytest.mark.slow
def test_fuzz_machine() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=250 * FACTOR,
            stateful_step_count=20,
            deadline=None,
            derandomize=FACTOR == 1,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
