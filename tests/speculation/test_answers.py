"""An answer is the same with and without drafts, whatever it asks for and whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from scipy.stats import chisquare
from speculation.kinds import PROMPTS, SCHEMA, options_of
from support import core_of

from asyncinfer import Completion, Engine, InvalidRequest
from asyncinfer.errors import InvalidConfig, PluginError
from asyncinfer.protocols import DraftRequest
from asyncinfer.scheduler import DraftModel
from asyncinfer.testing import FakeModel, InlineEngine
from asyncinfer.testing.oracle_proposer import OracleProposer

REQUESTS = 200
#: Of the fake model.
VOCAB = 258
#: Few blocks, so that requests are preempted.
CROWDED = {"block_size": 4, "max_running": 8, "max_step_tokens": 96}


class Garbage:
    """Proposes what nobody would say."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        return [[(7 * request.length) % 250] * request.most for request in requests]

    def end(self, request: DraftRequest) -> None:
        return None


#: What makes the drafts of an engine, by method.
METHODS: dict[str, dict[str, Any]] = {
    "prompt-lookup": {"proposers": ["prompt-lookup"]},
    "suffix": {"proposers": [("suffix", {"entries": 1 << 12})]},
    "oracle": {"proposers": [OracleProposer(VOCAB, eos_every=40, wrong_every=8)]},
    "garbage": {"proposers": [Garbage()]},
    # It ends texts too early, and has too few pages for all.
    "draft-model": {"draft": FakeModel(blocks=50, max_context=90, eos_every=9)},
    "mtp": {"draft": "mtp"},
}


def answers(config: dict[str, Any], **more: Any) -> tuple[list[Any], InlineEngine]:
    """What comes of every request, in one crowded engine."""
    predicts = config.get("draft") == "mtp"
    model = FakeModel(blocks=66, max_context=100, eos_every=40, predicts=predicts)
    engine = InlineEngine(model, **CROWDED, **config)
    streams = [
        engine.submit(PROMPTS[seed % 4], **options_of(seed), **more) for seed in range(REQUESTS)
    ]
    engine.run()
    found = []
    for stream, seed in zip(streams, range(REQUESTS), strict=True):
        stream.read()
        assert stream.ended, f"seed {seed}"
        each = []
        for index in range(options_of(seed)["n"]):
            logprobs = [s for c in stream.chunks if c.index == index for s in c.logprobs]
            reasons = [c.finish_reason for c in stream.chunks if c.index == index]
            each.append((stream.token_ids(index), stream.text(index), logprobs, reasons[-1]))
        found.append(each)
    return found, engine


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return answers({})[0]


@pytest.mark.parametrize("name", METHODS)
def test_answers_are_those_without_drafts(plain: list[Any], name: str) -> None:
    found, engine = answers(METHODS[name])
    for seed, (one, other) in enumerate(zip(found, plain, strict=True)):
        assert one == other, f"seed {seed}"
    stats = engine.stats()
    by_method = {each.method: each for each in stats.drafts}
    forced = by_method.pop("grammar")
    (drafts,) = by_method.values()
    # Formats leave these tokens no choice, and those with logprobs draw each of them. A draft with
    # which the answer ends has its last token counted as rejected: nothing goes on from it.
    assert sum(forced.accepted) > 100
    assert sum(forced.rejected) < 12
    # Prompts and answers of chance hardly repeat themselves, so that it looks at few of them.
    assert sum(drafts.rejected) > (8 if name == "prompt-lookup" else 50)
    if name in ("oracle", "garbage", "draft-model", "mtp"):
        assert (sum(drafts.accepted) > 200) == (name != "garbage")
    assert stats.preemptions > 10
    assert stats.cached_tokens > 200
    assert stats.running == stats.waiting == 0
    assert engine.admission.held_bytes == 0
    if name == "draft-model":
        assert model_of(engine).pages_free == 50


def model_of(engine: InlineEngine) -> DraftModel:
    model = engine.scheduler.speculator.proposers[-1]
    assert isinstance(model, DraftModel)
    return model


def test_answers_are_those_without_a_prediction(plain: list[Any]) -> None:
    expected = "".join(text for ((_, text, *_), *_) in plain[:40])
    found, engine = answers({}, prediction=expected)
    assert found == plain
    assert {each.method for each in engine.stats().drafts} == {"grammar", "prediction"}


@pytest.mark.parametrize("turns", range(1, 12, 3))
def test_aborted_at_any_step(turns: int) -> None:
    engine = InlineEngine(
        FakeModel(blocks=64), proposers=[OracleProposer(VOCAB, wrong_every=3)], block_size=4
    )
    streams = [engine.submit("hello", max_tokens=60, seed=i, n=2) for i in range(6)]
    engine.pump(turns)
    for stream in streams:
        stream.abort()
    engine.run()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.paused) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


@pytest.mark.parametrize("overlap", [1, 3])
def test_who_rests_goes_on_like_those_without_drafts(overlap: int) -> None:
    engine = InlineEngine(FakeModel(), proposers=[Garbage()], overlap=overlap)
    streams = [engine.submit("hello", max_tokens=150, seed=seed) for seed in range(2)]
    states = engine.scheduler.states
    flights: list[int] = []
    rested = woken = 0
    while engine.core.busy or not engine.core.inbox.empty():
        engine.pump()
        flights.append(max((r.in_flight for r in states.decoding.values()), default=0))
        rested += bool(states.decoding)
        woken += bool(rested and states.stepwise)
    # Two rows of a sequence are in flight beside the one that is collected.
    assert max(flights) == overlap - 1
    assert rested > 100 // overlap
    assert woken
    plain = InlineEngine(FakeModel())
    for seed, stream in enumerate(streams):
        other = plain.submit("hello", max_tokens=150, seed=seed)
        plain.run()
        stream.read()
        other.read()
        assert stream.token_ids() == other.token_ids()
    assert not states.resting


def test_usage_counts_what_was_drafted() -> None:
    engine = InlineEngine(FakeModel(), proposers=[OracleProposer(VOCAB, wrong_every=10**9)])
    stream = engine.submit("hello", max_tokens=40, seed=3)
    engine.run()
    stream.read()
    outcome = stream.request.buffer.outcome
    assert outcome is not None
    usage = outcome.usage
    assert usage.completion_tokens == 40
    assert usage.accepted_tokens > 20
    assert usage.rejected_tokens == 0
    (drafts,) = engine.stats().drafts
    assert (sum(drafts.accepted), sum(drafts.rejected)) == (usage.accepted_tokens, 0)
    assert engine.stats().steps < 20


def test_draws_have_their_distribution() -> None:
    # Greedy and seeded answers are equal one by one; this is the sum of many.
    engine = InlineEngine(FakeModel(), proposers=[OracleProposer(VOCAB)], max_running=64)
    streams = [engine.submit("d", max_tokens=24, seed=seed) for seed in range(400)]
    engine.run()
    counts = [0] * 16
    for stream in streams:
        stream.read()
        for token in stream.token_ids():
            counts[(token - 1) % 16] += 1
    expected = [sum((t - 1) % 16 == i for t in range(1, VOCAB)) for i in range(16)]
    scale = sum(counts) / sum(expected)
    assert chisquare(counts, [scale * e for e in expected]).pvalue > 1e-4


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 3, "repetition_penalty": 1.2, "top_p": 0.9, "logprobs": 1},
    {"seed": 6, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_p": 0.02},
    {"seed": 9, "json_schema": SCHEMA},
    {"seed": 12, "bad_words": ["the", "return a"], "n": 2, "temperature": 0.7},
    {"seed": 13, "sampler": ["dry", "top-n-sigma"], "logit_bias": {300: 2.0}},
    {"seed": 14, "sampler": "mirostat"},
    {"seed": 15, "typical_p": 0.8, "min_tokens": 6, "stop": ["\n"]},
    {"seed": 16, "guidance_scale": 1.7, "negative_prompt": "import os\n", "logprobs": 2},
    {"seed": 17, "guidance_scale": 2.0, "repetition_penalty": 1.1, "n": 2},
]


async def real_answers(
    kinds: Sequence[dict[str, Any]], **config: Any
) -> tuple[list[Completion], list[Completion]]:
    """Of the shipped model, without drafts and with them."""
    text = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n"
    async with Engine(**config) as engine:
        asked = [engine.generate(text, max_tokens=9, **kind) for kind in kinds]
        plain = await asyncio.gather(*asked)
    async with Engine(proposers=["prompt-lookup"], **config) as engine:
        asked = [
            # All but one token of what will be answered.
            engine.generate(
                text,
                max_tokens=9,
                prediction=[*done.token_ids[:5], 7, *done.token_ids[6:]],
                **kind,
            )
            for kind, done in zip(kinds, plain, strict=True)
        ]
        return plain, await asyncio.gather(*asked)


@pytest.mark.asyncio
@pytest.mark.usefixtures("drafts_pay")
async def test_a_real_model_answers_the_same() -> None:
    plain, drafted = await real_answers(KINDS)
    for kind, one, other in zip(KINDS, plain, drafted, strict=True):
        for a, b in zip(one.choices, other.choices, strict=True):
            assert a.token_ids == b.token_ids, kind
            assert (a.text, a.finish_reason) == (b.text, b.finish_reason), kind
            assert [s.logprob for s in a.logprobs] == pytest.approx(
                [s.logprob for s in b.logprobs], abs=1e-3
            )
    assert sum(done.usage.accepted_tokens for done in drafted) > 15
    # Its sampler has state, so that each token is drawn in a step of its own.
    assert drafted[6].usage.accepted_tokens == drafted[6].usage.rejected_tokens == 0
    # A guide's row verifies the same draft.
    assert drafted[8].usage.accepted_tokens > 2
    assert drafted[9].usage.accepted_tokens > 2


@pytest.mark.asyncio
@pytest.mark.usefixtures("drafts_pay")
async def test_deterministic_answers_are_the_same_to_the_last_bit() -> None:
    plain, drafted = await real_answers(KINDS[1:2], deterministic=True)
    assert plain[0].choices == drafted[0].choices
    assert drafted[0].usage.accepted_tokens > 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must be a string or a list of token ids"),
        ([1, -2], "prediction"),
        ([1, 10**6], "token ids must be <"),
        ("x" * 1_000_001, "at most 1000000"),
        ("\udc80", r"^prediction='\\udc80': .* at offset 0"),
    ],
)
def test_a_bad_prediction_is_refused(value: Any, message: str) -> None:
    engine = InlineEngine(FakeModel())
    with pytest.raises(InvalidRequest, match=message):
        engine.submit("x", prediction=value, max_tokens=2)
    engine.submit("x", max_tokens=2)
    engine.run()
    assert engine.stats().finished == 1


@pytest.mark.asyncio
async def test_unknown_proposers_are_named_before_a_model_is_loaded() -> None:
    with pytest.raises(PluginError, match="nobody"):
        await Engine.open(FakeModel(load_error=AssertionError()), proposers=["nobody"])
    with pytest.raises(InvalidConfig, match="proposers"):
        Engine(FakeModel(), proposers="prompt-lookup")


class Broken(Garbage):
    """Answers what cannot be used, in ways of its own."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> Any:
        self.calls += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer", [None, [], [[1], [2]], [["a"]], [[VOCAB]], [[-1]], [3], SystemExit(), KeyError("x")]
)
@pytest.mark.asyncio
async def test_a_broken_proposer_costs_nothing(answer: Any) -> None:
    broken = Broken(answer)
    async with Engine(FakeModel()) as engine:
        right = await engine.generate("hello", max_tokens=20, seed=1)
    async with Engine(FakeModel(), proposers=[broken]) as engine:
        done = await engine.generate("hello", max_tokens=20, seed=1)
        assert done.token_ids == right.token_ids
        assert engine.health().state == "degraded"
        assert "Broken" in engine.health().reasons[0]
        assert core_of(engine).scheduler.stats().running == 0
    # After three faults in a row it is not asked any more.
    assert broken.calls == 3


#: A grammar on a seeded row with penalties and plugin samplers.
ALL: dict[str, Any] = {
    "seed": 21,
    "json_schema": SCHEMA,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "sampler": ["dry", "top-n-sigma"],
    "top_p": 0.95,
    "logprobs": 1,
    "max_tokens": 40,
}


@pytest.mark.asyncio
async def test_all_of_it_on_one_row_that_is_cancelled_half_way() -> None:
    config = {"sampler_timeout": 60.0}
    async with Engine(**config) as engine:
        plain = await engine.generate("{", **ALL)
    assert plain.finish_reason == "stop"
    async with Engine(proposers=["prompt-lookup"], **config) as engine:
        drafted = await engine.generate("{", prediction=plain.token_ids, **ALL)
        assert drafted.token_ids == plain.token_ids
        assert drafted.parsed == plain.parsed
        assert drafted.usage.accepted_tokens > 3
        half = len(plain.token_ids) // 2
        beside = asyncio.ensure_future(engine.generate("once", seed=4, max_tokens=30))
        seen: list[int] = []
        async with engine.stream("{", prediction=plain.token_ids, **ALL) as stream:
            async for chunk in stream:
                seen += chunk.token_ids
                if len(seen) >= half:
                    break
        assert seen == list(plain.token_ids[: len(seen)])
        await beside
        again = await engine.generate("{", prediction=plain.token_ids, **ALL)
        assert again.token_ids == plain.token_ids
        stats = engine.stats()
        assert stats.running == stats.waiting == stats.paused == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
