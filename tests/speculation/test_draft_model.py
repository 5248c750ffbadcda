"""What a draft model keeps, what it gives back, and which ones are refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from models.families import random_model
from models.gguf_files import write_gguf

from asyncinfer import Engine, EngineConfig, InvalidConfig
from asyncinfer.builtin import DRAFT_PATH, MODEL_PATH
from asyncinfer.engine import Loaded
from asyncinfer.engine.checkpoint import CheckpointSource
from asyncinfer.scheduler import DraftModel, Step
from asyncinfer.speculation import DraftCost, StepCosts
from asyncinfer.speculation.drafter import AnswerView
from asyncinfer.testing import FakeModel, InlineEngine
from asyncinfer.testing.fake_adapters import FakeAdapters
from asyncinfer.text import Tokenizer

Q = gguf.GGMLQuantizationType
PAGES = 32
LONG = "a prompt of many tokens, which no single step can read as a whole"


def engine_of(draft: FakeModel, **config: Any) -> InlineEngine:
    return InlineEngine(FakeModel(blocks=64), draft=draft, **{"block_size": 4, **config})


def model_of(engine: InlineEngine) -> DraftModel:
    model = engine.scheduler.speculator.proposers[-1]
    assert isinstance(model, DraftModel)
    return model


def answer(draft: FakeModel, prompt: str = "hello", **config: Any) -> tuple[int, int]:
    """Drafted tokens that were right and wrong, of an answer that is that without drafts; in the
    end nothing is held."""
    engine = engine_of(draft, **config)
    stream = engine.submit(prompt, max_tokens=40, seed=3)
    engine.run()
    stream.read()
    assert stream.token_ids() == engine.core.runner.oracle(  # type: ignore[attr-defined]
        engine.core.loaded.tokenizer.encode(prompt), stream.request.params, 3, 40
    )
    assert model_of(engine).pages_free == draft.blocks
    outcome = stream.request.buffer.outcome
    assert outcome is not None
    return outcome.usage.accepted_tokens, outcome.usage.rejected_tokens


def test_a_model_that_draws_alike_is_always_right() -> None:
    right, wrong = answer(FakeModel(blocks=PAGES))
    assert right > 25
    assert wrong == 0


def test_a_long_prompt_is_read_in_parts() -> None:
    steps: list[Step] = []
    draft = FakeModel(blocks=PAGES, gate=lambda what, step: steps.append(step))
    right, _ = answer(draft, LONG, max_step_tokens=24)
    assert right > 10
    # Three parts of the prompt, which draw nothing before the last; and of all that follows each
    # token is computed once, but for the one that the last draw of a draft is.
    read = [step for step in steps[::2] if step.joins and step.tokens > 2]
    assert [step.samples for step in read] == [[0], [0], [1]]
    assert sum(step.tokens for step in read) > len(LONG)


def tokens_read(config: dict[str, Any], asked: Sequence[Mapping[str, Any]], at_once: bool) -> int:
    """Tokens that a draft model computes for one-token drafts of answers to a long prompt."""
    steps: list[Step] = []
    draft = FakeModel(blocks=128, gate=lambda what, step: steps.append(step))
    engine = engine_of(draft, **config)
    streams = []
    for options in asked:
        streams.append(engine.submit(LONG, **{"max_tokens": 9, "seed": 3, **options}))
        if not at_once:
            engine.run()
    engine.run()
    for stream in streams:
        stream.read()
        assert stream.token_ids() == streams[0].token_ids()
    assert model_of(engine).pages_free == 128
    return sum(step.tokens for step in steps[::2])


@pytest.mark.parametrize("at_once", [False, True])
def test_a_common_prompt_is_read_once(at_once: bool) -> None:
    for config in ({}, {"max_step_tokens": 24, "max_running": 2}):
        alone = tokens_read(config, [{}], at_once)
        assert alone > len(LONG)
        # Of each other answer all but the prompt's full blocks.
        more = 4 * (alone - len(LONG) + 8)
        assert tokens_read(config, [{}] * 5, at_once) < alone + more
    # Others may not find what a scope has, and nobody where no prefix is cached.
    scopes = [{"cache_scope": str(i)} for i in range(5)]
    assert tokens_read({}, scopes, at_once) > 5 * len(LONG)
    assert tokens_read({"prefix_cache": False}, [{}] * 5, at_once) > 5 * len(LONG)


def test_what_was_guessed_wrong_is_in_no_prefix() -> None:
    """A draft model that ends texts early is wrong often; its prefixes are what was answered."""
    engine = engine_of(FakeModel(blocks=64, eos_every=5))
    model = model_of(engine)
    cache = model.cache
    assert cache is not None
    right: set[tuple[int, ...]] = set()
    for seed in range(6):
        stream = engine.submit("hello", max_tokens=40, seed=seed)
        engine.run()
        stream.read()
        known = (*b"hello", *stream.token_ids())
        right |= {known[i : i + 4] for i in range(0, len(known), 4)}
    (counts,) = engine.stats().drafts
    assert sum(counts.rejected) > 5
    published = [tuple(entry.tokens) for entry in cache.by_block.values()]
    assert len(published) > 20
    assert set(published) <= right


def test_a_packed_draft_model_changes_no_answer() -> None:
    found = [shipped_answers({"weights": "int4", **config}) for config in DRAFTED]
    assert found[0][0] == found[1][0]
    assert sum(found[1][1].accepted) > 10


def test_a_model_in_gguf_drafts_for_another(tmp_path: Path) -> None:
    model = random_model("llama", "plain")
    for kind in (Q.F32, Q.Q8_0):
        (tmp_path / kind.name).mkdir()
    large, small = [
        write_gguf(model, tmp_path / kind.name / "model.gguf", kind) for kind in (Q.F32, Q.Q8_0)
    ]
    found = []
    for config in ({}, {"draft": small}):
        engine = InlineEngine(CheckpointSource(large), max_context=64, kv_bytes=1 << 22, **config)
        streams = [
            engine.submit([*range(3, 20)], max_tokens=24, seed=seed, ignore_eos=True, **greedy)
            for seed, greedy in enumerate(({"temperature": 0.0}, {}))
        ]
        engine.run()
        for stream in streams:
            stream.read()
        found.append([stream.token_ids() for stream in streams])
        counts = engine.stats().drafts
        engine.core.close()
    assert found[0] == found[1]
    assert sum(counts[0].accepted) > 10


@pytest.mark.asyncio
async def test_answers_with_adapters_are_drafted_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever steps take, drafts pay.
    monkeypatch.setattr(StepCosts, "cost", lambda *args: DraftCost(0.02))
    monkeypatch.setattr(StepCosts, "known", True)
    found = []
    for drafted in (False, True):
        model = FakeModel(blocks=64, adapters=FakeAdapters(2))
        draft = FakeModel(blocks=64) if drafted else None
        async with Engine(model, draft=draft, block_size=4, max_adapters=2) as engine:
            await engine.adapters.load("a", {"content": 7})
            asked = [
                engine.generate(LONG, max_tokens=30, seed=seed // 2, adapter=adapter)
                for seed, adapter in enumerate((None, "a", None, "a"))
            ]
            done = await asyncio.gather(*asked)
        found.append([each.token_ids for each in done])
        # What was drafted for an adapter's answers was wrong, and the rest right.
        for index, each in enumerate(done):
            accepted, rejected = each.usage.accepted_tokens, each.usage.rejected_tokens
            assert (accepted > 10, rejected > 1) == (
                drafted and not index % 2,
                drafted and index % 2,
            )
    assert found[0] == found[1]


def test_what_does_not_fit_has_no_drafts() -> None:
    assert answer(FakeModel(blocks=2)) == (0, 0)
    # No draft goes beyond the context of its model.
    right, wrong = answer(FakeModel(blocks=PAGES, max_context=24))
    assert (right > 4, wrong) == (True, 0)


@pytest.mark.parametrize("often", [1, 3])
def test_a_row_that_fails_costs_its_draft(often: int) -> None:
    def failing(step: Step) -> Mapping[int, Exception]:
        return {0: ValueError("nan")} if step.number % often == 0 else {}

    right, wrong = answer(FakeModel(blocks=PAGES, failing=failing))
    assert wrong == 0
    assert (right > 0) == (often > 1)


def test_a_row_that_fails_keeps_no_pages_while_its_answer_goes_on() -> None:
    failed: list[int] = []

    def failing(step: Step) -> Mapping[int, Exception]:
        failed.append(step.number)
        return {0: ValueError("nan")}

    engine = engine_of(FakeModel(blocks=PAGES, failing=failing))
    stream = engine.submit("hello", max_tokens=40, seed=3)
    while not failed:
        engine.pump()
    assert stream.request.outcome is None
    assert model_of(engine).pages_free == PAGES


@pytest.mark.parametrize("often", [1, 3])
def test_a_step_without_room_costs_its_draft(often: int) -> None:
    draft = FakeModel(blocks=PAGES, no_room=lambda step: step.number % often == 0)
    right, wrong = answer(draft)
    assert wrong == 0
    assert (right > 0) == (often > 1)


@pytest.mark.parametrize("fault", ["rows", "room"])
def test_one_that_always_fails_rests(fault: str) -> None:
    """It read the whole prompt anew in every step."""
    tried: list[int] = []

    def failing(step: Step) -> Mapping[int, Exception]:
        tried.append(step.number)
        return {0: ValueError("nan")}

    def no_room(step: Step) -> bool:
        tried.append(step.number)
        return True

    faulty = {"failing": failing} if fault == "rows" else {"no_room": no_room}
    draft = FakeModel(blocks=128, **faulty)  # type: ignore[arg-type]
    engine = engine_of(draft, buffer=200)
    stream = engine.submit(LONG, max_tokens=150, seed=3)
    engine.run()
    stream.read()
    assert len(stream.token_ids()) == 150
    # It is asked again after 32, 64 and 128 tokens.
    assert 1 <= len(tried) <= 4


def test_a_draft_copies_what_is_new_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, tokens = [0], AnswerView.tokens

    def counting(view: AnswerView, start: int = 0) -> list[int]:
        found = tokens(view, start)
        copied[0] += len(found)
        return found

    monkeypatch.setattr(AnswerView, "tokens", counting)
    prompt = 2 * LONG
    assert answer(FakeModel(blocks=128), prompt)[0] > 10
    assert copied[0] <= len(prompt) + 40


def pump_until_drafted(engine: InlineEngine, pages: int) -> None:
    for _ in range(30):
        if model_of(engine).pages_free < pages:
            return
        engine.pump()
    raise AssertionError("it never drafts")


@pytest.mark.parametrize("turns", range(3))
def test_nothing_is_kept_of_aborted_and_preempted_answers(turns: int) -> None:
    engine = engine_of(FakeModel(blocks=PAGES, eos_every=5), max_running=4)
    streams = [engine.submit("hello", max_tokens=90, seed=i, n=2) for i in range(3)]
    pump_until_drafted(engine, PAGES)
    engine.pump(turns)
    assert model_of(engine).pages_free < PAGES
    states = engine.scheduler.states
    for sequence in list(states.stepwise.values()):
        states.preempt(sequence)
    assert model_of(engine).pages_free == PAGES
    engine.pump(2)
    for stream in streams:
        stream.abort()
    engine.run()
    assert model_of(engine).pages_free == PAGES
    assert engine.stats().running == engine.stats().waiting == 0


def test_pages_are_taken_from_those_who_do_not_need_them() -> None:
    engine = engine_of(FakeModel(blocks=14))
    first = engine.submit("hello", max_tokens=40, seed=1, buffer=41)
    pump_until_drafted(engine, 14)
    engine.core.requests.pause(first.request.outputs[0], 0.0)
    second = engine.submit("another one", max_tokens=30, seed=2)
    engine.run()
    second.read()
    outcome = second.request.buffer.outcome
    assert outcome is not None
    assert outcome.usage.accepted_tokens > 10
    first.abort()
    engine.run()
    assert model_of(engine).pages_free == 14


@pytest.mark.parametrize("value", [3, "", {"a": 1}])
def test_what_is_no_model_is_refused(value: Any) -> None:
    with pytest.raises(InvalidConfig, match="draft="):
        Engine(FakeModel(), draft=value)


@pytest.mark.asyncio
async def test_another_vocabulary_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(DRAFT_PATH, other)
    file = other / "tokenizer.json"
    text = json.loads(file.read_text("utf-8"))
    vocabulary = text["model"]["vocab"]
    one, two = [word for word, number in vocabulary.items() if number in (300, 301)]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(text), "utf-8")

    def loads(*args: Any, **options: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("asyncinfer.runner.open_runner", loads)
    with pytest.raises(InvalidConfig, match=r"draft=.*vocabulary: token 300 is .*, not ") as caught:
        await Engine.open(draft=other)
    assert caught.value.field == "draft"


@pytest.mark.asyncio
async def test_models_of_another_kind_are_compared_when_both_are_there() -> None:
    model, draft = FakeModel(), FakeModel(tokenizer=Tokenizer.from_folder(DRAFT_PATH))
    with pytest.raises(InvalidConfig, match="vocabulary"):
        await Engine.open(model, draft=draft)
    for each in (model, draft):
        assert each.runner is not None
        assert each.runner.closed


#: Options of an engine without a draft model, and with one.
DRAFTED: list[dict[str, Any]] = [{}, {"draft": "embedded"}]


def shipped_answers(config: dict[str, Any]) -> tuple[list[list[int]], Any]:
    """Of the shipped model, and what became of the drafts."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 3, "repetition_penalty": 1.2, "top_p": 0.9, "logprobs": 1},
        {"seed": 5, "temperature": 0.7},
    ]
    engine = InlineEngine(CheckpointSource(MODEL_PATH), kv_bytes=1 << 22, **config)
    text = "def add(a, b):\n    return "
    streams = [engine.submit(text, max_tokens=24, **kind) for kind in kinds]
    engine.run()
    for stream in streams:
        stream.read()
    drafts = engine.stats().drafts
    engine.core.close()
    return [stream.token_ids() for stream in streams], drafts[0] if drafts else None


def test_the_shipped_draft_model_changes_no_answer() -> None:
    found = [shipped_answers(config) for config in DRAFTED]
    assert found[0][0] == found[1][0]
    counts = found[1][1]
    assert counts.method == "draft-model"
    assert sum(counts.accepted) > 20
    assert sum(counts.rejected) > 5


@pytest.mark.asyncio
async def test_it_is_closed_with_its_engine() -> None:
    draft = FakeModel()
    async with Engine(FakeModel(), draft=draft) as engine:
        await engine.generate("hello", max_tokens=8)
    assert draft.runner is not None
    assert draft.runner.closed


class Unclosable(FakeModel):
    """Its runner raises as it is closed, and is closed all the same."""

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        loaded = super().load(config, progress)
        runner: Any = loaded.runner
        close = runner.close

        def raising() -> None:
            close()
            raise RuntimeError("the device is lost")

        runner.close = raising
        return loaded


def test_one_that_cannot_be_closed_keeps_no_memory_of_the_other() -> None:
    draft, model = Unclosable(), FakeModel()
    engine = InlineEngine(model, draft=draft)
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.core.close()
    assert draft.runner is not None
    assert model.runner is not None
    assert (draft.runner.closed, model.runner.closed) == (True, True)


@pytest.mark.asyncio
async def test_neither_is_kept_where_opening_fails() -> None:
    draft, model = Unclosable(tokenizer=Tokenizer.from_folder(DRAFT_PATH)), Unclosable()
    with pytest.raises(InvalidConfig, match="must have the model's vocabulary"):
        await Engine.open(model, draft=draft)
    assert draft.runner is not None
    assert model.runner is not None
    assert (draft.runner.closed, model.runner.closed) == (True, True)


def test_an_answer_longer_than_the_draft_model_is_not_asked_for_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    propose = DraftModel.propose
    monkeypatch.setattr(
        DraftModel, "propose", lambda self, each: asked.append(each) or propose(self, each)
    )
    engine = engine_of(FakeModel(blocks=PAGES, max_context=32), overlap=4)
    stream = engine.submit("hello", max_tokens=200, seed=3, ignore_eos=True)
    engine.run()
    stream.read()
    steps = engine.scheduler.stats().steps
    assert steps > 100
    assert len(asked) < steps // 2
    assert stream.token_ids() == engine.core.runner.oracle(  # type: ignore[attr-defined]
        engine.core.loaded.tokenizer.encode("hello"), stream.request.params, 3, 200
    )
