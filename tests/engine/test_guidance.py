"""Classifier-free guidance: two sequences in step, with one answer."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from sampling.reference import guided_logits

from asyncinfer import Engine, InvalidRequest, SamplingParams
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.sampling import guide
from asyncinfer.scheduler import Sequence, Step
from asyncinfer.testing import FakeModel, InlineEngine
from asyncinfer.testing.oracle import answer_digests, guided, next_token

VOCAB = 258
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["ab", "ac"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
PROMPTS = ("hello", "hello there, this is a long prompt " * 2, "x")


def expected(prompt: str, negative: str | None, params: SamplingParams, seed: int) -> list[int]:
    """The answer that the fake model must give, each token from all before it."""
    given = [*prompt.encode()]
    free = given[-1:] if negative is None else [*negative.encode()]
    answer: list[int] = []
    while len(answer) < (params.max_tokens or 0):
        one, other = (answer_digests(each, [*answer, 0])[-1] for each in (given, free))
        token = next_token(
            guided(one, other, params.guidance_scale),
            len(given) + len(answer) - 1,
            seed=None if params.greedy else seed,
            vocab_size=VOCAB,
        )
        answer.append(token)
    return answer


def check_drained(engine: InlineEngine) -> None:
    stats, slots = engine.stats(), engine.scheduler.states.slots
    assert stats.running == stats.waiting == stats.paused == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert len(slots.free) == len(slots.sequences)
    assert not engine.scheduler.states.paired
    assert engine.admission.held_bytes == 0


def options_of(seed: int) -> dict[str, Any]:
    rng = Random(seed)
    options: dict[str, Any] = {
        "seed": seed,
        "max_tokens": rng.choice((1, 5, 20)),
        "temperature": rng.choice((0.0, 1.0)),
    }
    if rng.random() < 0.7:
        options["guidance_scale"] = rng.choice((0.0, 1.5, 3.0))
        options["negative_prompt"] = rng.choice((None, "n", "not this at all " * 2))
        options["logprobs"] = rng.choice((None, 1))
    return options


@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 16, "max_running": 64},
        # Few blocks and places, and prompts in parts.
        {"block_size": 4, "max_running": 5, "max_step_tokens": 24},
        {"block_size": 4, "max_running": 2, "max_step_tokens": 2},
        {"block_size": 4, "max_running": 8, "max_step_tokens": 16, "prefix_cache": False},
    ],
)
def test_in_mixed_batches_each_answer_is_its_own(config: dict[str, Any]) -> None:
    engine = InlineEngine(FakeModel(blocks=60, max_context=120), **config)
    streams = [engine.submit(PROMPTS[seed % 3], **options_of(seed)) for seed in range(48)]
    engine.run()
    for seed, stream in enumerate(streams):
        stream.read()
        options = options_of(seed)
        params = stream.request.params
        answer = stream.token_ids()
        if params.guidance_scale == 1:
            prompt = [*PROMPTS[seed % 3].encode()]
            runner: Any = engine.core.runner
            assert answer == runner.oracle(prompt, params, seed, params.max_tokens), seed
        else:
            negative = options["negative_prompt"]
            assert answer == expected(PROMPTS[seed % 3], negative, params, seed), seed
    assert engine.stats().preemptions == 0 or config["block_size"] == 4
    check_drained(engine)


def foreseen(prompt: str, options: dict[str, Any]) -> list[int]:
    """An answer's tokens, one in seven of them wrong."""
    params = SamplingParams(**{**options, "logprobs": None, "negative_prompt": None})
    right = expected(prompt, options.get("negative_prompt"), params, options["seed"])
    return [token if i % 7 < 6 else 1 + token % 200 for i, token in enumerate(right)]


@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 16, "max_running": 64},
        {"block_size": 4, "max_running": 6, "max_step_tokens": 24},
        {"block_size": 4, "max_running": 2, "max_step_tokens": 16},
    ],
)
def test_both_sequences_verify_one_draft(config: dict[str, Any]) -> None:
    engine = InlineEngine(FakeModel(blocks=60, max_context=120), **config)
    drafted: list[Step] = []
    launch = engine.core.runner.launch

    def noting(step: Step) -> Any:
        drafted.extend([step] if set(step.drafts) & set(step.guided) else [])
        return launch(step)

    engine.core.runner.launch = noting  # type: ignore[method-assign]
    seeds = [seed for seed in range(60) if "guidance_scale" in options_of(seed)]
    streams = [
        engine.submit(
            PROMPTS[seed % 3],
            **options_of(seed),
            prediction=foreseen(PROMPTS[seed % 3], options_of(seed)),
        )
        for seed in seeds
    ]
    engine.run()
    accepted = rejected = 0
    for seed, stream in zip(seeds, streams, strict=True):
        stream.read()
        params, negative = stream.request.params, options_of(seed)["negative_prompt"]
        assert stream.token_ids() == expected(PROMPTS[seed % 3], negative, params, seed), seed
        outcome = stream.request.buffer.outcome
        assert outcome is not None
        accepted += outcome.usage.accepted_tokens
        rejected += outcome.usage.rejected_tokens
    assert drafted
    for step in drafted:
        for row, (beside, _) in step.guided.items():
            assert step.drafts.get(row) == step.drafts.get(beside)
    assert accepted > (100 if config["max_running"] > 2 else 5)
    assert rejected > 5
    check_drained(engine)


def test_preempted_together() -> None:
    engine = InlineEngine(FakeModel(blocks=24), block_size=4, max_running=12)
    streams = [
        engine.submit("hello", max_tokens=30, seed=seed, guidance_scale=2.0, negative_prompt="not")
        for seed in range(5)
    ]
    engine.run()
    params = streams[0].request.params
    for seed, stream in enumerate(streams):
        stream.read()
        assert stream.token_ids() == expected("hello", "not", params, seed)
    assert engine.stats().preemptions > 2
    check_drained(engine)


@pytest.mark.parametrize("turns", range(1, 9))
def test_aborted_at_any_step(turns: int) -> None:
    engine = InlineEngine(FakeModel(blocks=40), block_size=4, max_step_tokens=16, overlap=2)
    streams = [
        engine.submit("hello" * 4, max_tokens=60, seed=i, n=2, guidance_scale=2.0) for i in range(4)
    ]
    engine.pump(turns)
    for stream in streams:
        stream.abort()
    engine.run()
    check_drained(engine)


def test_keys_of_a_negative_prompt_are_the_intakes() -> None:
    engine = InlineEngine(FakeModel(), block_size=4, prefix_cache=True)
    stream = engine.submit("hello", n=3, max_tokens=9, guidance_scale=2.0, negative_prompt="n" * 14)
    keys = [output.sequence.guide.keys for output in stream.request.outputs]
    assert len(keys[0]) == 3
    assert keys[1] is keys[2] is keys[0]
    engine.run()
    assert len(keys[0]) == 3
    check_drained(engine)


def test_a_pair_that_is_not_added_leaves_no_cycle() -> None:
    class Owner:
        pass

    def pair(owner: Owner) -> Sequence:
        one = partial(Sequence, max_total=9, seed=0, arrival=0.0, owner=owner)
        return one(0, [1], SamplingParams(), guide=one(1, [2], SamplingParams()))

    owner = Owner()
    there = weakref.ref(owner)
    gc.disable()
    try:
        pair(owner)
        del owner
        assert there() is None
    finally:
        gc.enable()


def test_a_full_buffer_pauses_both() -> None:
    engine = InlineEngine(FakeModel(blocks=21), block_size=4, max_running=4)
    first = engine.submit("hello", max_tokens=30, seed=1, guidance_scale=2.0, buffer=4)
    engine.run()
    assert engine.stats().paused == 2
    assert engine.stats().running == 0
    # Another one takes their blocks, and they come back.
    second = engine.submit("hello there", max_tokens=70, seed=2)
    engine.run()
    second.read()
    assert len(second.token_ids()) == 70
    while not first.ended:
        first.read()
        engine.run()
    assert first.token_ids() == expected("hello", None, first.request.params, 1)
    assert engine.stats().preemptions
    check_drained(engine)


@pytest.mark.parametrize("options", [{"json_schema": SCHEMA}, {"regex": "(ab|[0-9]){4,9}"}])
def test_formats_and_budgets_go_with_it(options: dict[str, Any]) -> None:
    engine = InlineEngine(FakeModel(), block_size=4)
    streams = [
        engine.submit("hello", max_tokens=60, seed=seed, guidance_scale=2.0, **options)
        for seed in range(6)
    ]
    thought = engine.submit("why <think>", max_tokens=40, thinking_budget=6, guidance_scale=3.0)
    engine.run()
    for stream in streams:
        stream.read()
        outcome = stream.request.buffer.outcome
        assert outcome is not None
        assert outcome.error is None
        if "regex" in options:
            assert re.fullmatch("(ab|[0-9]){4,9}", stream.text())
        else:
            assert json.loads(stream.text())["kind"] in ("ab", "ac")
    thought.read()
    assert "</think>" in thought.text()
    check_drained(engine)


@pytest.mark.parametrize("which", [0, 1])
def test_a_row_that_fails_fails_the_request(which: int) -> None:
    def failing(step: Step) -> Mapping[int, Exception]:
        if step.number != 4 or not step.guided:
            return {}
        return {min(step.guided) + which: ValueError("nan")}

    engine = InlineEngine(FakeModel(failing=failing), block_size=4)
    bad = engine.submit("hello", max_tokens=20, seed=1, guidance_scale=2.0)
    good = engine.submit("hello", max_tokens=20, seed=2, guidance_scale=2.0)
    engine.run()
    for stream in (bad, good):
        stream.read()
    outcome = bad.request.buffer.outcome
    assert outcome is not None
    assert "nan" in str(outcome.error)
    assert good.token_ids() == expected("hello", None, good.request.params, 2)
    check_drained(engine)


def test_a_step_without_room_is_tried_again() -> None:
    short = iter([False, True, False, True, False, True])
    model = FakeModel(no_room=lambda step: next(short, False))
    engine = InlineEngine(model, block_size=4)
    streams = [engine.submit("hello", max_tokens=9, seed=i, guidance_scale=2.0) for i in range(3)]
    engine.run()
    for seed, stream in enumerate(streams):
        stream.read()
        assert stream.token_ids() == expected("hello", None, stream.request.params, seed)
    check_drained(engine)


def test_a_pair_without_room_fails_alone() -> None:
    engine = InlineEngine(FakeModel(no_room=lambda step: bool(step.guided)), block_size=4)
    bad = engine.submit("hello", max_tokens=9, seed=1, guidance_scale=2.0)
    good = engine.submit("hello", max_tokens=9, seed=2)
    engine.run()
    outcome = bad.request.buffer.outcome
    assert outcome is not None
    assert outcome.error is not None
    good.read()
    assert len(good.token_ids()) == 9
    check_drained(engine)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"guidance_scale": 101.0}, "guidance_scale"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"negative_prompt": "x"}, "negative_prompt"),
        ({"guidance_scale": 2.0, "negative_prompt": ""}, "negative_prompt"),
        ({"guidance_scale": 2.0, "negative_prompt": [1, -1]}, "negative_prompt"),
        ({"guidance_scale": 2.0, "negative_prompt": [10**6]}, "negative_prompt"),
        ({"guidance_scale": 2.0, "negative_prompt": 3}, "negative_prompt"),
        ({"guidance_scale": 2.0, "negative_prompt": "x" * 70}, "negative_prompt"),
        ({"guidance_scale": 2.0, "max_tokens": 40}, "max_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    engine = InlineEngine(FakeModel(blocks=16, max_context=64), block_size=4)
    with pytest.raises(InvalidRequest) as caught:
        engine.submit("hello", **{"max_tokens": 2, **options})
    assert caught.value.field == field
    check_drained(engine)


@pytest.mark.parametrize("name", ["max_running", "max_step_tokens"])
def test_an_engine_of_one_place_refuses(name: str) -> None:
    engine = InlineEngine(FakeModel(), **{name: 1})
    with pytest.raises(InvalidRequest, match=f"needs {name} >= 2"):
        engine.submit("hello", guidance_scale=2.0)


def test_a_runner_without_guides_refuses() -> None:
    engine = InlineEngine(FakeModel(strict=False))
    with pytest.raises(InvalidRequest, match=r"guidance_scale.*no guides"):
        engine.submit("hello", guidance_scale=2.0)


def test_an_open_number_of_tokens_is_what_fits_both() -> None:
    engine = InlineEngine(FakeModel(blocks=16, max_context=64), block_size=4)
    stream = engine.submit("hello", guidance_scale=2.0, seed=1)
    engine.run()
    stream.read()
    # 16 blocks of 4: 9 for the prompt and its answer, 7 or 8 for the guide.
    assert 28 <= len(stream.token_ids()) <= 32
    check_drained(engine)


def test_logits_are_those_of_the_definition() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 33) * 4
    before = logits.tolist()
    scales = [1.5, 0.0]
    rows, guides = torch.tensor([0, 3]).numpy(), torch.tensor([1, 4]).numpy()
    guide(logits, rows, guides, scales)
    for row, beside, scale in zip(rows, guides, scales, strict=True):
        right = guided_logits(before[row], before[beside], scale)
        assert logits[row].tolist() == pytest.approx(right, abs=1e-4)
    assert logits[[1, 2, 4]].tolist() == [before[i] for i in (1, 2, 4)]


@pytest.mark.asyncio
async def test_answers_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_PATH)
    cases = [
        ("def add(a, b):\n", "class Stack:\n    def push(self):\n", 1.7),
        ("import os\n", None, 2.5),
    ]
    async with Engine() as engine:
        for prompt, negative, scale in cases:
            ids = engine.tokenizer.encode(prompt)
            beside = None if negative is None else engine.tokenizer.encode(negative)
            right = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=16,
                do_sample=False,
                guidance_scale=scale,
                negative_prompt_ids=None if beside is None else torch.tensor([beside]),
                pad_token_id=tokenizer.eos_token_id,
            )[0, len(ids) :].tolist()
            done = await engine.generate(
                ids, max_tokens=16, temperature=0.0, guidance_scale=scale, negative_prompt=beside
            )
            assert done.token_ids == tuple(right)[: len(done.token_ids)]
            plain = await engine.generate(ids, max_tokens=16, temperature=0.0)
            assert plain.token_ids != done.token_ids
