"""What a schema's masks allow is what a validator accepts, in both directions."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_schemas import document, schemas

from asyncinfer import Engine
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.grammar import GrammarCompiler
from asyncinfer.structured_output import AnswerFormat
from asyncinfer.testing import FakeModel
from asyncinfer.text import Tokenizer

jsonschema = pytest.importorskip("jsonschema")

SCHEMAS = schemas()
#: Answers asked for at once, those of other kinds included.
BATCH = 32
#: More than nearly every answer takes.
ROOM = 700


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


def test_there_are_schemas_of_many_kinds() -> None:
    assert len(SCHEMAS) >= 300
    assert len({json.dumps(schema) for schema in SCHEMAS}) >= 300


async def answers(engine: Engine, chosen: list[Any], most: int = ROOM) -> tuple[int, int]:
    """Ask for an answer to each schema, in batches beside others. Gives how many were whole, and
    how many were cut short."""
    whole = cut = 0
    width = BATCH - 4
    for first in range(0, len(chosen), width):
        part = chosen[first : first + width]
        done = await asyncio.gather(
            *(
                engine.generate("q", json_schema=schema, max_tokens=most, seed=first + i)
                for i, schema in enumerate(part)
            ),
            *others(engine, first),
        )
        for schema, answer in zip(part, done, strict=False):
            if answer.finish_reason == "stop":
                whole += 1
                assert valid(schema, answer.parsed), (schema, answer.text)
            else:
                assert (answer.finish_reason, answer.parsed) == ("length", None)
                assert len(answer.token_ids) == most
                cut += 1
    return whole, cut


@pytest.mark.asyncio
async def test_every_answer_is_accepted_in_batches_with_others() -> None:
    async with Engine(FakeModel(strict=False, blocks=4096)) as engine:
        whole, cut = await answers(engine, SCHEMAS)
    assert cut <= whole // 20


@pytest.mark.asyncio
async def test_every_answer_is_accepted_with_tokens_of_many_bytes(tokenizer: Tokenizer) -> None:
    model = FakeModel(strict=False, blocks=4096, tokenizer=tokenizer)
    async with Engine(model) as engine:
        whole, cut = await answers(engine, SCHEMAS[::4])
    assert cut <= whole // 20


@pytest.mark.asyncio
async def test_every_answer_is_accepted_under_preemption() -> None:
    # So few blocks that a batch does not fit.
    async with Engine(FakeModel(strict=False, blocks=22, max_context=340)) as engine:
        whole, cut = await answers(engine, SCHEMAS[1::4], most=300)
        assert engine.stats().preemptions > 0
    assert cut <= whole // 10


@pytest.mark.asyncio
async def test_every_answer_is_accepted_alone_and_while_others_are_cancelled() -> None:
    async with Engine(FakeModel(strict=False, blocks=4096)) as engine:
        for i, schema in enumerate(SCHEMAS[2::12]):
            alone = await engine.generate("q", json_schema=schema, max_tokens=ROOM, seed=i)
            leaving = [
                engine.stream("q", json_schema=each, max_tokens=ROOM) for each in SCHEMAS[:8]
            ]
            asked = engine.generate("q", json_schema=schema, max_tokens=ROOM, seed=i)

            async def leave(stream: Any, after: int) -> None:
                async with stream:
                    for _ in range(after):
                        if await anext(stream, None) is None:
                            return

            done, *_ = await asyncio.gather(
                asked, *(leave(stream, after) for after, stream in enumerate(leaving))
            )
            assert done.text == alone.text
            if done.finish_reason == "stop":
                assert valid(schema, done.parsed)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_shipped_model_is_accepted_too() -> None:
    small = [schema for schema in SCHEMAS[::40] if len(json.dumps(schema)) < 300]
    async with Engine() as engine:
        whole, _ = await answers(engine, small[:8], most=80)
    assert whole >= len(small[:8]) // 2


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
