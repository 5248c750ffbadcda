"""The fake model tells right from wrong: it agrees with the oracle, and shows every bad page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
from support import columns

from asyncinfer.cache import KVGroupSpec
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Join, PageChanges, RunnerSpec, Step
from asyncinfer.testing import FakeRunner
from asyncinfer.testing.fake_steps import FakeSteps
from asyncinfer.testing.oracle import EOS_ID
from asyncinfer.testing.strict_runner import StrictRunner

SPEC = RunnerSpec(
    (KVGroupSpec(16),),
    block_size=4,
    max_slots=4,
    max_context=32,
    vocab_size=100,
    max_step_tokens=32,
)
PROMPT = [11, 12, 13, 14, 15, 16]
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0)
Make: TypeAlias = Callable[..., FakeSteps]
every_runner = pytest.mark.parametrize("make", [FakeRunner, StrictRunner])


def join(slot: int, blocks: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> Join:
    return Join(slot, PROMPT, len(PROMPT), [blocks], params, seed=7, **more)


def prefill(runner: FakeSteps, slot: int, blocks: Sequence[int], **more: Any) -> list[int]:
    plan = Step(0, [slot], [0], [len(PROMPT)], [1], joins=[join(slot, blocks, **more)])
    return runner.collect(runner.launch(plan)).tokens


def decode(runner: FakeSteps, slot: int, start: int, **more: Any) -> list[int]:
    plan = Step(1, [slot], [start], [1], [1], **more)
    return runner.collect(runner.launch(plan)).tokens


@every_runner
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunks", [(6,), (1, 5), (2, 3, 1), (4, 2)])
def test_it_agrees_with_the_oracle(
    make: Make, params: SamplingParams, chunks: tuple[int, ...]
) -> None:
    runner = make(SPEC)
    tokens: list[int] = []
    start = 0
    for step, count in enumerate(chunks):
        draws = int(start + count == len(PROMPT))
        plan = Step(step, [2], [start], [count], [draws])
        if not step:
            plan.joins = [join(2, [9, 3, 5, 1], params)]
        tokens += runner.collect(runner.launch(plan)).tokens
        start += count
    for position in range(6, 15):
        tokens += decode(runner, 2, position)
    assert tokens == runner.oracle(PROMPT, params, 7, 10)


def test_seeds_positions_and_prompts_matter() -> None:
    runner = FakeRunner(SPEC)
    answers = {
        tuple(runner.oracle(prompt, params, seed, 8))
        for prompt in (PROMPT, PROMPT[1:], PROMPT[::-1])
        for params in (GREEDY, SAMPLED)
        for seed in (1, 2)
    }
    assert len(answers) == 9, "three greedy ones, which ignore the seed, and six sampled"


@every_runner
def test_drawn_tokens_feed_the_next_step_before_they_are_collected(make: Make) -> None:
    runner = make(SPEC)
    plans = [Step(0, [0], [0], [6], [1], joins=[join(0, [0, 1])])]
    plans += [Step(i, [0], [5 + i], [1], [1]) for i in (1, 2)]
    handles = [runner.launch(plan) for plan in plans]
    tokens = [runner.collect(handle).tokens[0] for handle in handles]
    assert tokens == runner.oracle(PROMPT, GREEDY, 7, 3)


@every_runner
def test_a_copied_block_holds_what_its_source_held(make: Make) -> None:
    runner = make(SPEC)
    prefill(runner, 0, [0, 1])
    plan = Step(
        1, [1], [5], [1], [1], joins=[join(1, [0, 2])], groups=[PageChanges(copies=[(1, 2)])]
    )
    assert runner.collect(runner.launch(plan)).tokens == runner.oracle(PROMPT, GREEDY, 7, 1)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_poisoned_page_shows(bad: int) -> None:
    runner = StrictRunner(SPEC)
    prefill(runner, 0, [4, 5])
    runner.pages[0].poison([4 + bad])
    assert decode(runner, 0, 6) != runner.oracle(PROMPT, GREEDY, 7, 2)[1:]


@every_runner
def test_a_page_never_written_shows(make: Make) -> None:
    runner = make(SPEC)
    plan = Step(0, [0], [4], [2], [1], joins=[join(0, [0, 1])])
    tokens = runner.collect(runner.launch(plan)).tokens
    assert tokens != runner.oracle(PROMPT, GREEDY, 7, 1)


WRITTEN_IN_THE_SAME_STEP = Step(
    0, [0, 1], [0, 4], [6, 2], [1, 1], joins=[join(0, [0, 1]), join(1, [0, 2])]
)


def test_a_page_that_another_row_reads_is_not_written() -> None:
    with pytest.raises(AssertionError, match="shared"):
        StrictRunner(SPEC).launch(WRITTEN_IN_THE_SAME_STEP)


def test_a_page_written_in_the_same_step_is_not_there_yet() -> None:
    plan = WRITTEN_IN_THE_SAME_STEP
    runner = FakeRunner(SPEC)
    right, wrong = runner.collect(runner.launch(plan)).tokens
    assert [right] == runner.oracle(PROMPT, GREEDY, 7, 1)
    assert wrong != right


def test_end_of_text_comes_about_as_often_as_asked() -> None:
    runner = FakeRunner(SPEC, eos_every=5)
    answer = runner.oracle(PROMPT, GREEDY, 0, 2000)
    assert 300 < answer.count(EOS_ID) < 500
    assert EOS_ID not in FakeRunner(SPEC).oracle(PROMPT, GREEDY, 0, 2000)


@every_runner
def test_stop_tokens_are_barred_until_min_tokens(make: Make) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3)
    runner = make(SPEC)
    stop_ids = frozenset(runner.oracle(PROMPT, GREEDY, 7, 3))
    tokens = prefill(runner, 0, [0, 1, 2, 3], params=params, stop_ids=stop_ids)
    for position in range(6, 12):
        tokens += decode(runner, 0, position)
    assert tokens == runner.oracle(PROMPT, params, 7, 7, stop_ids=stop_ids)
    assert not stop_ids & set(tokens[:3])


@every_runner
def test_logprobs_are_those_promised(make: Make) -> None:
    runner = make(SPEC)
    params = SamplingParams(temperature=0.0, logprobs=2)
    plan = Step(0, [0], [0], [6], [1], joins=[join(0, [0, 1], params)], prompt_logprobs={0: 1})
    result = runner.collect(runner.launch(plan))
    row, scored = columns(result.logprobs[0]), columns(result.prompt_logprobs[0])
    entry = runner.logprob(result.tokens[0], 6, 2)
    assert (row.token_ids, row.logprobs) == ([entry.token_id], [entry.logprob])
    assert len(row.top[0]) == 2
    assert scored.token_ids == PROMPT[1:]
    assert scored.logprobs[0] == runner.logprob(12, 1, 1).logprob


@every_runner
def test_failed_rows_leave_garbage(make: Make) -> None:
    error = ArithmeticError("NaN logits")
    runner = make(SPEC, failing=lambda plan: {0: error})
    plan = Step(0, [0], [0], [6], [1], joins=[join(0, [0, 1])])
    assert runner.collect(runner.launch(plan)).failed == {0: error}
    runner.failing = None
    assert decode(runner, 0, 6) != runner.oracle(PROMPT, GREEDY, 7, 2)[1:]


def test_the_gate_sees_every_call_and_may_raise() -> None:
    calls: list[tuple[str, int]] = []

    def gate(phase: str, plan: Step) -> None:
        calls.append((phase, plan.number))
        if len(calls) == 3:
            raise RuntimeError("gate")

    runner = FakeRunner(SPEC, gate=gate)
    prefill(runner, 0, [0, 1])
    with pytest.raises(RuntimeError, match="gate"):
        decode(runner, 0, 6)
    assert calls == [("launch", 0), ("collect", 0), ("launch", 1)]


BAD_PLANS = {
    "a skipped token": Step(1, [0], [7], [1], [1]),
    "a repeated token": Step(1, [0], [5], [1], [0]),
    "an unknown token": Step(1, [0], [6], [2], [1]),
    "a draw in the middle": Step(1, [0], [6], [1], [2]),
    "an empty slot": Step(1, [1], [0], [1], [1]),
    "a slot twice": Step(1, [0, 0], [6, 6], [1, 1], [1, 1]),
    "a gap in the table": Step(1, [0], [6], [1], [1], groups=[PageChanges(grown=[(0, 3, 5)])]),
    "an entry twice": Step(1, [0], [6], [1], [1], groups=[PageChanges(grown=[(0, 1, 5)])]),
    "leaving twice": Step(1, [0], [6], [1], [1], leaves=[1]),
    "a taken slot": Step(1, [0], [6], [1], [1], joins=[join(0, [5, 6])]),
    "an idle join": Step(1, [0], [6], [1], [1], joins=[join(1, [5, 6])]),
    "nothing": Step(1),
    "over the budget": Step(1, [1], [0], [33], [0], joins=[join(1, [5, 6])]),
}


@every_runner
@pytest.mark.parametrize("kind", BAD_PLANS)
def test_an_inconsistent_plan_is_refused(kind: str, make: Make) -> None:
    runner = make(SPEC)
    prefill(runner, 0, [0, 1])
    with pytest.raises(AssertionError):
        runner.launch(BAD_PLANS[kind])


@every_runner
def test_a_table_too_short_is_refused(make: Make) -> None:
    runner = make(SPEC)
    prefill(runner, 0, [0, 1])
    decode(runner, 0, 6)
    decode(runner, 0, 7)
    with pytest.raises(AssertionError, match="too short"):
        decode(runner, 0, 8)


@every_runner
def test_collects_come_in_the_order_of_launches(make: Make) -> None:
    runner = make(SPEC)
    runner.launch(Step(0, [0], [0], [6], [1], joins=[join(0, [0, 1])]))
    second = runner.launch(Step(1, [0], [6], [1], [1]))
    with pytest.raises(AssertionError, match="before step"):
        runner.collect(second)


@every_runner
def test_nothing_runs_after_close(make: Make) -> None:
    runner = make(SPEC)
    runner.close()
    with pytest.raises(AssertionError):
        prefill(runner, 0, [0, 1])
    with pytest.raises(AssertionError):
        runner.close()
