"""Beam search against transformers, and in an engine full of other requests."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine.beam_models import (
    CONFIGS,
    NEW,
    PROMPT,
    beam_model,
    ends,
    group_searches,
    theirs,
)
from support import OpenEngine, Until, core_of

from asyncinfer import Completion, Engine, InvalidRequest, SamplingParams, SyncEngine
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.engine.beam_group import BeamGroup
from asyncinfer.testing import FakeModel

pytestmark = pytest.mark.asyncio


@dataclass(frozen=True)
class Checkpoint:
    family: str
    folder: str
    model: Any
    ends: tuple[int, int]

    def open(self) -> Engine:
        return Engine(self.folder, device="cpu", dtype="float32", kv_bytes=1 << 24)


@pytest.fixture(scope="module", params=[*CONFIGS])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    model = beam_model(request.param)
    model.save_pretrained(folder)
    for file in MODEL_PATH.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return Checkpoint(request.param, str(folder), model, ends(model))


def ours(done: Completion) -> list[tuple[tuple[int, ...], float]]:
    return [(choice.token_ids, choice.score or 0.0) for choice in done.choices]


def check(found: Any, expected: Any) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [s for _, s in found] == pytest.approx([s for _, s in expected], rel=1e-4, abs=1e-4)


CASES: list[dict[str, Any]] = [
    {},
    {"length_penalty": 0.0},
    {"length_penalty": 2.0, "early_stopping": "never"},
    {"length_penalty": -1.0, "early_stopping": True},
]


async def test_sequences_and_scores_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    model, eos = checkpoint.model, checkpoint.ends[0]
    options: dict[str, Any] = {"max_tokens": NEW, "stop_token_ids": [eos], "ignore_eos": True}
    ended = set()
    async with checkpoint.open() as engine:
        others = [
            asyncio.ensure_future(engine.generate([9, i], max_tokens=40, seed=i)) for i in range(3)
        ]
        for beams in range(1, 9):
            for case in CASES if beams > 1 else CASES[:1]:
                done = await engine.beam_search(PROMPT, beams=beams, **options, **case)
                expected = theirs(model, beams, eos, **case)
                if beams == 1:
                    assert done.token_ids == expected[0][0]
                else:
                    check(ours(done), expected)
                ended |= {choice.finish_reason for choice in done.choices}
                lengths = [len(choice.token_ids) for choice in done.choices]
                assert done.usage.completion_tokens == sum(lengths)
        assert ended == {"stop", "length"}
        await asyncio.gather(*others)


async def test_groups_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    # Version 5 has none: `record_beam_groups` asked the one before.
    recorded = json.loads(Path(__file__).with_name("beam_groups.json").read_text("utf-8"))
    of_family = [each for each in recorded["searches"] if each["family"] == checkpoint.family]
    assert [each["search"] for each in of_family] == 2 * [*group_searches()]
    async with checkpoint.open() as engine:
        for each in of_family:
            assert each["eos"] in checkpoint.ends
            options = {"max_tokens": NEW, "stop_token_ids": [each["eos"]], "ignore_eos": True}
            done = await engine.beam_search(PROMPT, **options, **each["search"])
            check(ours(done), [(tuple(tokens), score) for tokens, score in each["answers"]])


async def test_bars_and_formats_hold_in_every_answer() -> None:
    async with Engine(max_context=128) as engine:
        prompt = "def add(a, b):"
        numbers = await engine.beam_search(prompt, beams=4, regex="[0-9]{3}x?", max_tokens=9)
        assert len({choice.text for choice in numbers.choices}) == 4
        for choice in numbers.choices:
            assert choice.text.rstrip("x").isdigit()
            assert choice.finish_reason == "stop"
        some = await engine.beam_search(prompt, beams=3, allowed_token_ids=range(300), max_tokens=5)
        assert max(max(choice.token_ids) for choice in some.choices) < 300
        data = await engine.beam_search(
            prompt, beams=2, json_schema={"enum": ["a", "b", 3]}, max_tokens=20
        )
        assert {choice.parsed for choice in data.choices} <= {"a", "b", 3}
        # There are fewer answers than beams.
        few = await engine.beam_search(prompt, beams=8, choice=["yes", "no"], max_tokens=9)
        assert {choice.text for choice in few.choices} == {"yes", "no"}


async def test_no_more_tokens_are_looked_at_than_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many tokens that end a text are many candidates: for 64 beams a second of every step."""
    looked: list[int] = []
    advance = BeamGroup.advance

    def noted(self: BeamGroup, following: Any, taken: Any) -> Any:
        looked.extend(sum(reason != "stop" for *_, reason in each) for each in following)
        return advance(self, following, taken)

    monkeypatch.setattr(BeamGroup, "advance", noted)
    async with Engine(FakeModel()) as engine:
        await engine.beam_search("a", beams=4, max_tokens=3, stop_token_ids=range(100, 164))
        assert 4 <= min(looked) <= max(looked) <= 8
        options = {"groups": 2, "diversity_penalty": 1.0}
        await engine.beam_search(
            "a", beams=4, max_tokens=3, stop_token_ids=range(100, 164), **options
        )
        assert max(looked) <= 8


async def test_the_same_answers_beside_others_and_without_room(open_engine: OpenEngine) -> None:
    async def search(engine: Engine, beams: int) -> Any:
        done = await engine.beam_search(
            "a prompt that takes two blocks", beams=beams, max_tokens=40
        )
        return ours(done)

    async with open_engine(FakeModel()) as engine:
        alone = [await search(engine, beams) for beams in (2, 5)]
    for model in (FakeModel(blocks=36, max_context=256), FakeModel(strict=True)):
        async with open_engine(model, max_running=7) as engine:
            others = [engine.generate(f"{i}", max_tokens=90, seed=i) for i in range(8)]
            searches = [search(engine, beams) for beams in (2, 5)]
            found = await asyncio.gather(*searches, *others)
            assert found[:2] == alone
            if model.blocks == 36:
                assert engine.stats().preemptions > 0


async def test_cancelled_at_any_step_it_leaves_nothing(open_engine: OpenEngine) -> None:
    for turns in range(0, 60, 3):
        async with open_engine(FakeModel()) as engine:
            task = asyncio.ensure_future(engine.beam_search("x" * 20, beams=4, max_tokens=400))
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns > 30:
                while engine.stats().steps < turns:
                    await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len((await engine.generate("y", max_tokens=3)).token_ids) == 3


async def test_a_deadline_and_a_failing_row_end_the_search(
    open_engine: OpenEngine, until: Until
) -> None:
    async with open_engine() as engine:
        with pytest.raises(TimeoutError):
            await engine.beam_search("x", beams=3, max_tokens=100_000 // 64, deadline=0.05)
        # The watchdog may have told of it while a step ran.
        await until(lambda: not core_of(engine).requests.live)


async def test_best_of_gives_the_likeliest_of_the_answers() -> None:
    async with Engine(max_context=128) as engine:
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
        every = await engine.generate("def add(a, b):", n=6, logprobs=0, **options)
        means = [
            sum(each.logprob for each in choice.logprobs) / len(choice.logprobs)
            for choice in every.choices
        ]
        best = await engine.best_of("def add(a, b):", candidates=6, n=2, **options)
        assert [choice.score for choice in best.choices] == pytest.approx(sorted(means)[:-3:-1])
        assert best.token_ids == every.choices[means.index(max(means))].token_ids
        assert best.logprobs == ()
        assert [choice.index for choice in best.choices] == [0, 1]


async def test_best_of_has_logprobs_however_they_are_asked_for() -> None:
    params = SamplingParams(max_tokens=8, seed=3, logprobs=1)
    async with Engine(FakeModel()) as engine:
        plain = await engine.best_of("abc", candidates=4, max_tokens=8, seed=3)
        assert plain.choices[0].score
        told = await engine.best_of("abc", candidates=4, params=params)
        assert [len(each.top) for each in told.logprobs] == [1] * 8
        # None is no choice of logprobs, and the answers are scored by them.
        for options in ({"max_tokens": 8, "seed": 3}, {"params": params}):
            none = await engine.best_of("abc", candidates=4, logprobs=None, **options)
            assert none.choices == plain.choices
        some = SamplingParams(max_tokens=8, seed=3, logprob_token_ids=[65, 66])
        told = await engine.best_of("abc", candidates=4, params=some)
        assert [len(each.top) for each in told.logprobs] == [2] * 8
        assert told.choices[0].score == plain.choices[0].score
        for budget in ({"thinking_budget": 5}, {"params": SamplingParams(thinking_budget=5)}):
            with pytest.raises(InvalidRequest, match=r"^thinking_budget=5: not with best_of\(\)"):
                await engine.best_of("abc", candidates=2, **budget)


async def test_without_an_event_loop() -> None:
    await asyncio.to_thread(search_without_a_loop)


def search_without_a_loop() -> None:
    with SyncEngine(FakeModel()) as engine:
        done = engine.beam_search("x", beams=3, max_tokens=5)
        assert len(done.choices) == 3
        assert done.choices[0].score == max(choice.score or 0.0 for choice in done.choices)
        assert len(engine.best_of("x", candidates=3, max_tokens=5).choices) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"beams": 0}, "beams"),
        ({"beams": 65}, "beams"),
        ({"beams": 4, "groups": 3, "diversity_penalty": 1.0}, "groups"),
        ({"beams": 4, "groups": 2}, "diversity_penalty"),
        ({"beams": 4, "diversity_penalty": 1.0}, "diversity_penalty"),
        ({"beams": 4, "early_stopping": "soon"}, "early_stopping='soon': must be True, False or"),
        ({"beams": 4, "length_penalty": float("nan")}, "length_penalty"),
        ({"beams": 4, "temperature": 1.0}, "temperature"),
        ({"beams": 4, "seed": 1}, "seed"),
        ({"beams": 4, "stop": "a"}, "stop"),
        ({"beams": 4, "max_tokens": 0}, "max_tokens"),
    ],
)
async def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match=field):
            await engine.beam_search("x", **options)
        with pytest.raises(InvalidRequest, match="candidates"):
            await engine.best_of("x", candidates=0)
