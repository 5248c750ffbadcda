"""Steps that the device has no memory for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Sequence, SequenceState, Step
from asyncinfer.testing import FakeModel, InlineEngine
from asyncinfer.testing.simulation import Simulation

Make = Callable[..., Simulation]
Greedy = Callable[..., SamplingParams]


def larger_than(tokens: int) -> Callable[[Step], bool]:
    return lambda plan: plan.tokens > tokens


def nth(step: int) -> Callable[[Step], bool]:
    launches = iter(range(1 << 30))
    return lambda plan: next(launches) == step


def test_a_prompt_is_computed_in_smaller_chunks(make: Make, greedy: Greedy) -> None:
    # fault 23
    sizes: list[int] = []

    def no_room(plan: Step) -> bool:
        sizes.append(plan.tokens)
        return plan.tokens > 16

    sim = make(no_room=no_room)
    track = sim.submit(list(range(1, 41)), greedy(3))[0]
    sim.run_until(lambda: len(track.tokens) > 0)
    assert sizes[:2] == [32, 16]
    sim.drain()
    assert track.ended == "length"


def test_a_prompt_that_has_no_room_twice_fails_alone(make: Make, greedy: Greedy) -> None:
    # fault 23
    sim = make(no_room=larger_than(6))
    short = sim.submit([1, 2, 3], greedy(20))[0]
    sim.run_until(lambda: len(short.tokens) > 1)
    long = sim.submit(list(range(1, 41)), greedy(3))[0]
    sim.drain()
    assert (short.ended, long.ended) == ("length", "failed")
    assert sim.scheduler.stats().blocks_free + sim.scheduler.stats().blocks_cached == 64


def test_fewer_rows_decode_together(make: Make, greedy: Greedy) -> None:
    # fault 24
    sim = make(no_room=larger_than(4), slots=8)
    tracks = [sim.submit([first], greedy(6))[0] for first in range(1, 4)]
    sim.run_until(lambda: all(track.tokens for track in tracks))
    tracks += [sim.submit([first], greedy(6))[0] for first in range(4, 8)]
    sim.drain()
    assert all(track.ended == "length" for track in tracks[:3])
    assert [track.ended for track in tracks].count("length") >= 5


def test_a_single_token_that_has_no_room_fails(make: Make, greedy: Greedy) -> None:
    # fault 24
    sim = make(no_room=lambda plan: True)
    track = sim.submit([1], greedy(6))[0]
    sim.drain()
    assert track.ended == "failed"


def test_steps_grow_again(make: Make, greedy: Greedy) -> None:
    sim = make(no_room=nth(0))
    first = sim.submit(list(range(1, 33)), greedy(2))[0]
    sim.run_until(lambda: first.ended is not None)
    other = sim.submit([1], greedy(40))[0]
    sim.run_until(lambda: len(other.tokens) == 20)
    sim.submit(list(range(60, 1, -1)), greedy(1))
    sim.step()
    assert sim.plan is not None
    assert sim.plan.tokens == 32


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("cached", [True, False])
def test_no_step_is_one_too_many(make: Make, greedy: Greedy, depth: int, cached: bool) -> None:
    """Whichever launch fails, every answer is right and every block comes back."""
    for step in range(24):
        sim = make(no_room=nth(step), depth=depth, budget=16, cached=cached, blocks=24)
        prompt = list(range(1, 25))
        tracks = [
            *sim.submit(prompt, greedy(5, n=3)),
            *sim.submit([*prompt, 30, 31], greedy(7, prompt_logprobs=0)),
            *sim.submit([5, 6], greedy(9)),
        ]
        sim.drain()
        assert all(track.ended == "length" for track in tracks), step


def test_steps_grow_again_while_the_answer_to_that_prompt_goes_on(
    make: Make, greedy: Greedy
) -> None:
    """One lack of room kept steps small until all that was in the step had ended."""
    sim = make(budget=128, context=512, blocks=256, no_room=nth(0))
    first = sim.submit(list(range(1, 51)), greedy(400))[0]
    sim.run_until(lambda: len(first.tokens) == 100)
    sim.submit([*range(99, 0, -1)] * 2, greedy(1))
    sim.step()
    assert sim.plan is not None
    assert sim.plan.tokens == 128


def test_steps_stay_small_while_that_prompt_is_computed(make: Make, greedy: Greedy) -> None:
    """It would fail if it had no room again."""
    sim = make(budget=128, context=1024, blocks=512, cached=False, no_room=larger_than(40))
    track = sim.submit(list(range(1, 61)) * 15, greedy(2))[0]
    sim.drain()
    assert track.ended == "failed", "64 is more than 40, too: the second time"
    sim = make(budget=64, context=1024, blocks=512, cached=False, no_room=larger_than(40))
    track = sim.submit(list(range(1, 61)) * 15, greedy(2))[0]
    sim.drain()
    assert track.ended == "length"


def test_a_small_device_computes_few_steps_in_vain(make: Make, greedy: Greedy) -> None:
    refused = 0

    def no_room(plan: Step) -> bool:
        nonlocal refused
        refused += plan.tokens > 4
        return plan.tokens > 4

    sim = make(slots=8, context=512, blocks=1024, no_room=no_room)
    tracks = [sim.submit([first], greedy(300))[0] for first in range(1, 9)]
    sim.drain()
    lost = [track.ended for track in tracks].count("failed")
    assert lost <= 4, "single-token prompts that were in two such steps before the first answer"
    assert refused < 12


@pytest.mark.parametrize("answers", [6, 7])
def test_rows_take_turns_where_a_step_has_no_room_for_all(
    make: Make, greedy: Greedy, answers: int
) -> None:
    """The first of them went on, and the others not at all."""
    small = False
    sim = make(no_room=lambda plan: small and plan.tokens > 3)
    tracks = [sim.submit([first], greedy(30))[0] for first in range(1, answers + 1)]
    sim.run_until(lambda: all(track.tokens for track in tracks))
    small = True
    before = [len(track.tokens) for track in tracks]
    for _ in range(2 * answers):
        sim.step()
    # Three tokens a step.
    assert [len(track.tokens) for track in tracks] == [count + 6 for count in before]
    sim.drain()
    assert all(track.ended == "length" for track in tracks)


def test_answers_of_a_format_take_turns_too() -> None:
    small = False
    engine = InlineEngine(FakeModel(no_room=lambda step: small and step.tokens > 3), buffer=200)
    streams = [engine.submit("q", regex="[ab]{90}", seed=seed) for seed in range(7)]
    (*outputs,) = (output for stream in streams for output in stream.request.outputs)
    while not all(output.count for output in outputs):
        engine.pump()
    small = True
    before = [output.count for output in outputs]
    engine.pump(28)
    gained = [output.count - count for output, count in zip(outputs, before, strict=True)]
    assert 0 < max(gained) <= min(gained) + 2
    engine.run()
    assert all(stream.error is None for stream in streams)


def test_a_prompt_goes_on_beside_more_answers_than_a_small_step_holds(
    make: Make, greedy: Greedy
) -> None:
    small = False
    sim = make(slots=8, budget=32, context=256, no_room=lambda plan: small and plan.tokens > 8)
    answers = [sim.submit([first], greedy(60))[0] for first in range(1, 8)]
    sim.run_until(lambda: all(track.tokens for track in answers))
    small = True
    prompt = sim.submit(list(range(1, 41)), greedy(1))[0]
    sim.run_until(lambda: prompt.ended is not None)
    assert not any(track.ended for track in answers)


def test_who_was_to_be_told_tokens_in_a_step_without_room_joins_anew(
    make: Make, greedy: Greedy
) -> None:
    sim = make()
    told, other = sim.submit([1, 2, 3], greedy(8))[0], sim.submit([4, 5], greedy(8))[0]
    sim.step()
    sim.scheduler.states.slots.force(told.sequence, told.tokens)
    step = sim.scheduler.schedule(0.0)
    assert step is not None
    assert not sim.scheduler.retract(step, 0.0)
    assert told.sequence.state is SequenceState.WAITING
    assert (told.sequence.preemptions, other.sequence.preemptions) == (1, 0)


def test_a_draft_in_a_step_that_is_taken_back_was_never_computed() -> None:
    prompt, params = [1, 2, 3], SamplingParams()
    sequence = Sequence(0, prompt, params, max_total=32, seed=0, arrival=0.0)
    before = sequence.computed, sequence.draws_left, sequence.drafted
    step = Step(0)
    step.add_chunk(sequence, 3, (4, 5))
    assert (sequence.computed, sequence.draws_left, sequence.drafted) == (5, 26, 2)
    step.take_back()
    assert (sequence.computed, sequence.draws_left, sequence.drafted) == before
