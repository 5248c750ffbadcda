"""What a schema's masks allow is what a validator accepts, in both directions."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar_schemas import document, schemas

from asyncinfer import Completion, Engine
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.engine.checkpoint import CheckpointSource
from asyncinfer.grammar import GrammarCompiler
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.structured_output import AnswerFormat
from asyncinfer.testing import FakeModel, InlineEngine
from asyncinfer.text import Tokenizer

jsonschema = pytest.importorskip("jsonschema")

SCHEMAS = schemas()
EVERY = range(len(SCHEMAS))
#: Enough to draw from another vocabulary, or by another model.
SOME = EVERY[::3]
#: Others, to draw with little room.
REST = EVERY[1::3]
#: Answers asked for at once, those of other kinds included.
BATCH = 32
#: More than nearly every answer takes.
ROOM = 700
#: More than most answers of the shipped model take.
FEW = 56
#: Of an answer that is cut off.
BEGINNING = 8


def valid(schema: Any, value: Any) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    return bool(validator.is_valid(value))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(Path(MODEL_PATH))


def others(engine: Engine, seed: int) -> Iterator[Any]:
    """Requests of other kinds, which are beside the answers."""
    yield engine.generate("p", max_tokens=50, seed=seed)
    yield engine.generate("p", max_tokens=20, temperature=0.0, logprobs=1)
    yield engine.generate("p", regex="[a-z]{3,9}", max_tokens=20, seed=seed)
    yield engine.generate("p", choice=["a", "bb"], repetition_penalty=1.5, seed=seed)


async def leave(engine: Engine, schema: Any, after: int) -> None:
    """Cancel an answer after so many of its chunks."""
    async with engine.stream("q", json_schema=schema, max_tokens=ROOM) as stream:
        for _ in range(after):
            if await anext(stream, None) is None:
                return


def test_there_are_schemas_of_many_kinds() -> None:
    assert len(SCHEMAS) >= 300
    assert len({json.dumps(schema) for schema in SCHEMAS}) >= 300


@dataclass
class Answers:
    """What came of an answer to each schema: its text if it is whole."""

    most: int = ROOM
    texts: list[str | None] = field(default_factory=list)

    def add(self, schema: Any, answer: Completion) -> None:
        if answer.finish_reason == "stop":
            assert valid(schema, answer.parsed), (schema, answer.text)
            self.texts.append(answer.text)
        else:
            assert (answer.finish_reason, answer.parsed) == ("length", None)
            assert len(answer.token_ids) == self.most
            self.texts.append(None)

    @property
    def cut(self) -> int:
        return self.texts.count(None)


async def answer(engine: Engine, index: int, most: int) -> Completion:
    """At temperature 1."""
    return await engine.generate("q", json_schema=SCHEMAS[index], max_tokens=most, seed=index)


async def answers(engine: Engine, most: int = ROOM, wanted: range = EVERY) -> Answers:
    """To the schemas `wanted`, in batches beside requests of other kinds and some that leave."""
    found = Answers(most)
    for first in range(0, len(wanted), BATCH - 8):
        part = wanted[first : first + BATCH - 8]
        done = await asyncio.gather(
            *(answer(engine, index, most) for index in part),
            *others(engine, first),
            *(leave(engine, SCHEMAS[first - 3 * after], after) for after in range(1, 5)),
        )
        for index, each in zip(part, done, strict=False):
            found.add(SCHEMAS[index], each)
    assert len(found.texts) == len(wanted)
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.paused == 0
    return found


@pytest.mark.asyncio
async def test_every_answer_is_accepted_beside_others_and_with_too_little_room() -> None:
    async with Engine(FakeModel(strict=False, blocks=4096)) as engine:
        roomy = await answers(engine)
    assert roomy.cut <= len(SCHEMAS) // 20
    # So few blocks that a batch does not fit.
    async with Engine(FakeModel(strict=False, blocks=22, max_context=340)) as engine:
        crowded = await answers(engine, most=300, wanted=REST)
        assert engine.stats().preemptions > 0
    assert crowded.cut <= len(REST) // 10
    for index, text in zip(REST, crowded.texts, strict=True):
        assert text in (roomy.texts[index], None)


@pytest.mark.asyncio
async def test_every_answer_is_accepted_alone_with_tokens_of_many_bytes(
    tokenizer: Tokenizer,
) -> None:
    alone = Answers()
    async with Engine(FakeModel(strict=False, blocks=4096, tokenizer=tokenizer)) as engine:
        for index in SOME:
            alone.add(SCHEMAS[index], await answer(engine, index, ROOM))
        assert (await answers(engine, wanted=SOME)).texts == alone.texts
    assert alone.cut <= len(SOME) // 20


@pytest.fixture(scope="module")
def shipped() -> Answers:
    """Of the shipped model."""

    async def run() -> Answers:
        # So few blocks that a batch does not fit.
        async with Engine(max_context=128, kv_bytes=1 << 21, block_size=8) as engine:
            found = await answers(engine, most=FEW, wanted=SOME)
            assert engine.stats().preemptions > 0
            return found

    return asyncio.run(run())


@pytest.mark.slow
def test_every_answer_of_the_shipped_model_is_accepted(shipped: Answers) -> None:
    assert shipped.cut <= 2 * len(SOME) // 5


@pytest.mark.slow
def test_every_answer_of_the_shipped_model_is_accepted_alone(shipped: Answers) -> None:
    engine = InlineEngine(CheckpointSource(MODEL_PATH), max_context=128, kv_bytes=1 << 21)
    before = torch.get_num_threads()
    # Of a step this small several threads make much more work.
    use_cpu_threads(1)
    cut = 0
    # Others were answered alone by the fake model.
    part = range(0, len(SOME), 3)
    for at in part:
        index, text = SOME[at], shipped.texts[at]
        schema = SCHEMAS[index]
        # One that needs more room needs it here, too, and shows how it begins.
        most = FEW if text else BEGINNING
        stream = engine.submit("q", json_schema=schema, max_tokens=most, seed=index)
        engine.run()
        stream.read()
        if stream.chunks[-1].finish_reason == "stop":
            assert valid(schema, json.loads(stream.text())), (schema, stream.text())
        else:
            assert len(stream.token_ids()) == most
            cut += 1
    use_cpu_threads(before)
    engine.core.close()
    assert cut <= sum(shipped.texts[at] is None for at in part) + 1


def test_no_document_that_a_schema_allows_is_forbidden(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    rng = random.Random(11)
    tried = 0
    for schema in SCHEMAS:
        form = AnswerFormat("json_schema", json.dumps(schema, ensure_ascii=False))
        for _ in range(3):
            value = document(schema, rng)
            if not valid(schema, value):
                continue
            tried += 1
            text = json.dumps(value, ensure_ascii=False)
            (made,) = compiler.matchers(form, 1, most_forced=0)
            tokens = tokenizer.encode(text, add_special_tokens=False)
            taken = made.state.try_consume_tokens(tokens)
            assert taken == len(tokens), (schema, text, tokenizer.decode(tokens[: taken + 1]))
            assert made.complete or made.state.is_accepting(), (schema, text)
    assert tried > 2.5 * len(SCHEMAS)
