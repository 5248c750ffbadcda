"""Prompts beside answers: their chunks follow the speed of the steps, by a made-up clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Priority
from asyncinfer.scheduler.prompt_pace import PromptPace
from asyncinfer.speculation import StepCosts
from asyncinfer.testing import FakeModel, InlineEngine, Step
from asyncinfer.testing.simulation import Simulation, Track

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]
TARGET = 0.1
BLOCK = 4


@dataclass
class Machine:
    """Takes its time for every step: so much for the step, and so much for each token."""

    sim: Simulation
    step_seconds: float
    token_seconds: float
    #: Seconds of each step, and its tokens of prompts, where it had answers and a prompt.
    seconds: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)

    def step(self, held_up: float = 0.0) -> None:
        """Compute a step."""
        began = self.sim.now
        assert self.sim.schedule()
        plan = self.sim.plan
        assert plan is not None
        self.sim.now += self.step_seconds + self.token_seconds * plan.tokens + held_up
        self.sim.update()
        if 0 < plan.answers < len(plan.sequences):
            self.seconds.append(self.sim.now - began)
            self.chunks.append(sum(plan.counts[plan.answers :]))

    def until_drawn(self, track: Track, most: int = 5000) -> float:
        """Seconds until the prompt's first token."""
        began = self.sim.now
        for _ in range(most):
            self.step()
            if track.tokens:
                return self.sim.now - began
        raise AssertionError(f"no token in {most} steps")


@pytest.fixture
def machine(make: Make, greedy: Greedy) -> Callable[..., Machine]:
    """A machine that computes the answers of eight streams."""

    def machine(
        *,
        step_seconds: float = 0.01,
        token_seconds: float = 0.002,
        step_target: float | None = TARGET,
        streams: int = 8,
        **options: Any,
    ) -> Machine:
        sim = make(
            blocks=2000,
            slots=streams + 4,
            context=2000,
            budget=512,
            step_target=step_target,
            **options,
        )
        made = Machine(sim, step_seconds, token_seconds)
        for first in range(streams):
            sim.submit([1 + first], greedy(1500))
        for _ in range(8 if streams else 0):
            made.step()
        made.seconds.clear()
        made.chunks.clear()
        return made

    return machine


def prompt(first: int, length: int = 1000) -> list[int]:
    return [1 + (first + i * i) % 99 for i in range(length)]


def test_the_others_keep_their_pace(machine: Callable[..., Machine], greedy: Greedy) -> None:
    paced, bare = machine(), machine(streams=0)
    alone = bare.until_drawn(bare.sim.submit(prompt(5), greedy(1))[0])
    beside = paced.until_drawn(paced.sim.submit(prompt(5), greedy(1))[0])
    assert max(paced.seconds) <= 2 * TARGET
    settled = paced.seconds[4:-1]
    assert len(settled) > 10
    assert 0.9 * TARGET <= min(settled) <= max(settled) <= 1.1 * TARGET
    # Of each step, answers and the step itself take a quarter of the target.
    assert beside <= 1.45 * alone


def test_without_a_target_a_prompt_fills_the_step(
    machine: Callable[..., Machine], greedy: Greedy
) -> None:
    for target in (None, inf):
        unpaced = machine(step_target=target)
        unpaced.until_drawn(unpaced.sim.submit(prompt(5), greedy(1))[0])
        assert unpaced.chunks == [504, 496]


def test_nobody_waits_for_a_prompt_alone(machine: Callable[..., Machine], greedy: Greedy) -> None:
    bare = machine(streams=0, token_seconds=1.0)
    track = bare.sim.submit(prompt(5), greedy(1))[0]
    counts = []
    for _ in range(2):
        bare.step()
        assert bare.sim.plan is not None
        counts.append(bare.sim.plan.tokens)
    assert counts == [512, 488]
    assert track.tokens


def test_what_a_prompt_takes_is_known_after_the_first(
    machine: Callable[..., Machine], greedy: Greedy
) -> None:
    bare = machine(streams=0)
    pace = bare.sim.scheduler.planner.pace
    assert pace.seconds(1000) == 0.0
    alone = bare.until_drawn(bare.sim.submit(prompt(5), greedy(1))[0])
    assert pace.seconds(1000) == pytest.approx(alone, rel=0.01)


def test_short_chunks_do_not_make_prompts_look_long() -> None:
    """A step has costs of its own, whatever its prompt's tokens are."""
    pace = PromptPace(None, 16, StepCosts())

    def chunk(tokens: int) -> None:
        step = Step(0)
        step.counts.append(tokens)
        pace.computed(step, 0.004 + tokens * 1e-5)

    chunk(32)
    assert pace.seconds(2000) > 0.2
    chunk(2000)
    assert pace.seconds(2000) == pytest.approx(0.024)
    for _ in range(3):
        chunk(32)
    assert pace.seconds(2000) == pytest.approx(0.024, rel=0.05)
    # In case the machine is slower now, that is forgotten.
    for _ in range(300):
        chunk(32)
    assert pace.seconds(2000) > 0.2


def test_a_machine_that_becomes_slower(machine: Callable[..., Machine], greedy: Greedy) -> None:
    paced = machine()
    track = paced.sim.submit(prompt(5), greedy(1))[0]
    for _ in range(6):
        paced.step()
    before = paced.chunks[-1]
    paced.token_seconds *= 4
    paced.seconds.clear()
    paced.until_drawn(track)
    # Two steps show that it is so. Those after them fit.
    assert sum(seconds > 1.6 * TARGET for seconds in paced.seconds) == 2
    assert max(paced.seconds[4:]) <= 1.6 * TARGET
    assert paced.chunks[-2] < before / 3


def test_a_machine_that_becomes_faster(machine: Callable[..., Machine], greedy: Greedy) -> None:
    paced = machine(token_seconds=0.008)
    paced.sim.submit(prompt(5), greedy(1))
    for _ in range(6):
        paced.step()
    before = paced.chunks[-1]
    paced.token_seconds /= 8
    for _ in range(6):
        paced.step()
    assert paced.chunks[-1] > 4 * before
    assert max(paced.seconds) <= 2 * TARGET


def test_one_step_that_was_held_up_changes_nothing(
    machine: Callable[..., Machine], greedy: Greedy
) -> None:
    paced = machine()
    paced.sim.submit(prompt(5), greedy(1))
    for _ in range(6):
        paced.step()
    paced.step(held_up=5.0)
    for _ in range(4):
        paced.step()
    assert len(set(paced.chunks[5:])) == 1


def test_a_prompt_moves_on_where_answers_alone_are_too_slow(
    machine: Callable[..., Machine], greedy: Greedy
) -> None:
    slow = machine(step_seconds=1.0, token_seconds=0.01)
    beside = slow.until_drawn(slow.sim.submit(prompt(5), greedy(1))[0])
    # Half as long again as without the prompt, whatever the target.
    assert max(slow.seconds) <= 1.7
    assert min(slow.chunks[10:-1]) >= 40
    assert beside < 50


def test_a_prompt_gets_a_block_of_every_step(
    machine: Callable[..., Machine], greedy: Greedy
) -> None:
    hopeless = machine(step_seconds=0.0, token_seconds=3.0)
    hopeless.until_drawn(hopeless.sim.submit(prompt(5, 200), greedy(1))[0])
    assert set(hopeless.chunks[3:]) == {BLOCK}


def test_several_prompts_go_in_the_order_of_the_policy(
    machine: Callable[..., Machine], greedy: Greedy
) -> None:
    paced = machine(policy=Priority(ageing=1e6))
    tracks = [
        paced.sim.submit(prompt(10 * urgency, 150), greedy(1), priority=urgency)[0]
        for urgency in (0, 2, 1)
    ]
    drawn: dict[int, float] = {}
    for _ in range(100):
        paced.step()
        for at, track in enumerate(tracks):
            if track.tokens:
                drawn.setdefault(at, paced.sim.now)
    assert sorted(drawn, key=drawn.__getitem__) == [1, 2, 0]
    assert max(paced.seconds) <= 2 * TARGET


def test_a_lack_of_room_bounds_a_chunk_as_well(make: Make, greedy: Greedy) -> None:
    sim = make(
        budget=64, context=200, blocks=200, step_target=TARGET, no_room=lambda step: tight[0]
    )
    tight = [False]
    sim.submit([1], greedy(100))
    sim.step()
    sim.submit(prompt(5, 150), greedy(1))
    tight[0] = True
    sim.schedule()
    tight[0] = False
    small = sim.scheduler.planner.budget.tokens
    assert sim.schedule()
    assert sim.plan is not None
    assert sim.plan.tokens <= small < 64
    sim.update()
    sim.drain()


@pytest.mark.parametrize("overlap", [1, 2])
def test_an_engine_measures_its_steps(overlap: int) -> None:
    chunks: list[int] = []

    def gate(phase: str, step: Step) -> None:
        if phase == "collect":
            engine.now += 0.002 + 0.001 * step.tokens
            if 0 < step.answers < len(step.sequences):
                chunks.append(sum(step.counts[step.answers :]))

    engine = InlineEngine(
        FakeModel(gate=gate, max_context=2000), step_target=0.05, overlap=overlap, max_running=4
    )
    streams = [engine.submit([first], max_tokens=300, ignore_eos=True) for first in (1, 2)]
    engine.pump(4)
    long = engine.submit(prompt(5), max_tokens=1, ignore_eos=True)
    engine.run()
    for stream in (*streams, long):
        stream.read()
        assert stream.error is None
    # 50 ms less the step's own two and two answers, to the next multiple of eight.
    assert chunks[5:-1] == [48] * len(chunks[5:-1])
    assert len(chunks) > 20
    assert all(later <= 64 for _, later in pairwise(chunks))
