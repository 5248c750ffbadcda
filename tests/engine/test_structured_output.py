"""Answers fit what their requests ask for, whatever else happens in the engine."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from support import OpenEngine, core_of, places

from asyncinfer import Engine, InvalidRequest, RequestFailed
from asyncinfer.testing import FakeModel, ScriptedModel

pytestmark = pytest.mark.asyncio

#: Always ends, and has names that have to follow.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "address": {
            "type": "object",
            "properties": {
                "street_name": {"enum": ["first", "second", "third"]},
                "house_number": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["street_name", "house_number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "address"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return len(value["name"]) <= 8 and 1 <= value["address"]["house_number"] <= 99


@pytest.mark.parametrize("strict", [True, False])
async def test_every_kind_in_one_batch(strict: bool) -> None:
    async with Engine(FakeModel(strict=strict)) as engine:
        person, number, word, tree, plain = await asyncio.gather(
            engine.generate("a", json_schema=PERSON, max_tokens=900, n=3, seed=1),
            engine.generate("b", regex=r"[0-9]{3}-[0-9]{4}", max_tokens=20),
            engine.generate("c", choice=["left", "right", "löwe"], max_tokens=20),
            engine.generate("d", grammar='root ::= "x" | "(" root ")"', max_tokens=2000, seed=1),
            engine.generate("e", max_tokens=30),
        )
        assert all(is_person(choice.parsed) for choice in person.choices)
        assert re.fullmatch(r"\d{3}-\d{4}", number.text)
        assert word.text in ("left", "right", "löwe")
        assert re.fullmatch(r"\(*x\)*", tree.text)
        assert tree.text.count("(") == tree.text.count(")")
        for done in (person, number, word, tree):
            assert done.finish_reason == "stop"
            assert done.usage.completion_tokens == sum(len(c.token_ids) for c in done.choices)
        assert plain.finish_reason == "length"
        assert plain.parsed is None
        stats = engine.stats()
        assert stats.grammars_compiled == 4
        assert stats.forced_tokens > 50
        assert stats.masks >= stats.grammars_compiled
        assert stats.mask_seconds > 0
        assert stats.compile_seconds > 0


async def test_a_seed_gives_the_same_answer_beside_others_and_after_preemption() -> None:
    async def ask(engine: Engine, seed: int) -> str:
        done = await engine.generate("q", json_schema=PERSON, max_tokens=900, seed=seed)
        return done.text

    async with Engine(FakeModel()) as engine:
        alone = [await ask(engine, seed) for seed in range(6)]
    # So few blocks that sequences are preempted.
    async with Engine(FakeModel(blocks=40, max_context=512)) as engine:
        others = [engine.generate(f"r{i}", max_tokens=200, seed=i) for i in range(6)]
        together = await asyncio.gather(*(ask(engine, seed) for seed in range(6)), *others)
        assert engine.stats().preemptions > 0
    assert together[:6] == alone


async def test_overlap_changes_nothing() -> None:
    texts = []
    for overlap in (1, 3):
        async with Engine(FakeModel(), overlap=overlap) as engine:
            done = await asyncio.gather(
                *(
                    engine.generate("q", json_schema=PERSON, max_tokens=900, seed=seed)
                    for seed in range(4)
                ),
                *(engine.generate("p", max_tokens=100, seed=seed) for seed in range(4)),
            )
            texts.append([each.text for each in done])
    assert texts[0] == texts[1]


async def test_a_lack_of_room_loses_no_forced_token() -> None:
    steps = iter(range(10**6))

    def no_room(step: Any) -> bool:
        return bool(step.forced) and next(steps) % 3 == 0

    async with Engine(FakeModel()) as engine:
        right = await engine.generate("q", json_schema=PERSON, max_tokens=900, seed=1)
    async with Engine(FakeModel(no_room=no_room)) as engine:
        done = await engine.generate("q", json_schema=PERSON, max_tokens=900, seed=1)
        assert engine.stats().preemptions > 0
    assert done.text == right.text


async def test_length_is_said_and_the_text_is_a_beginning(open_engine: OpenEngine) -> None:
    async with open_engine(FakeModel()) as engine:
        whole = await engine.generate("q", json_schema=PERSON, max_tokens=900, seed=3)
        for most in range(1, len(whole.token_ids), 7):
            done = await engine.generate("q", json_schema=PERSON, max_tokens=most, seed=3)
            assert len(done.token_ids) == most
            assert done.token_ids == whole.token_ids[:most]
            assert done.finish_reason == "length"
            assert done.parsed is None
        most = len(whole.token_ids)
        done = await engine.generate("q", json_schema=PERSON, max_tokens=most, seed=3)
        assert done.finish_reason == "stop"


async def test_an_object_that_is_nested_too_deeply_is_none() -> None:
    """As the arguments of a call are; it was a `RecursionError`."""
    said = '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"
    async with Engine(ScriptedModel([said])) as engine:
        done = await engine.generate("q", json_object=True, max_tokens=30_000)
    assert (done.text, done.finish_reason, done.parsed) == (said, "stop", None)


async def test_what_a_stop_string_cuts_off_is_no_object() -> None:
    pydantic = pytest.importorskip("pydantic")
    form = pydantic.create_model("Form", age=(int, pydantic.Field(ge=0, le=9)))
    async with Engine(FakeModel()) as engine:
        for schema in (form, PERSON, None):
            asked = {"json_object": True} if schema is None else {"json_schema": schema}
            done = await engine.generate("q", stop=["{"], include_stop=True, **asked)
            assert (done.text, done.finish_reason, done.parsed) == ("{", "stop", None)


async def test_a_stream_has_partial_objects() -> None:
    async with Engine(FakeModel()) as engine:
        seen, text = [], ""
        async with engine.stream("q", json_schema=PERSON, max_tokens=900, seed=1) as stream:
            async for chunk in stream:
                text += chunk.text
                seen.append(chunk)
        assert len(seen) < sum(len(chunk.token_ids) for chunk in seen)
        assert seen[0].partial == {}
        assert seen[-1].partial == json.loads(text)
        assert is_person(seen[-1].partial)
        async for chunk in engine.stream("q", max_tokens=3):
            assert chunk.partial is None


async def test_a_typed_answer_is_an_object() -> None:
    pydantic = pytest.importorskip("pydantic")
    fields = {"name": (str, pydantic.Field(max_length=5)), "age": (int, pydantic.Field(ge=0, le=9))}
    person = pydantic.create_model("Person", **fields)
    adapter = pydantic.TypeAdapter(tuple[bool, bool])
    async with Engine(FakeModel()) as engine:
        done = await engine.generate("q", json_schema=person, max_tokens=900, seed=1)
        assert isinstance(done.parsed, person)
        done = await engine.generate("q", json_schema=adapter, max_tokens=900, seed=1)
        assert isinstance(done.parsed, tuple)
        for _ in range(2):
            await engine.generate("q", json_schema=person, max_tokens=9)
        assert engine.stats().grammar_hits == 2


async def test_forced_tokens_count_in_everything() -> None:
    async with Engine(FakeModel()) as engine:
        whole = await engine.generate("q", regex="begin: (one|two)hundred", max_tokens=99, seed=1)
        assert whole.text[:7] == "begin: "
        assert engine.stats().forced_tokens == len("egin: ") + len("nehundred")
        # A stop string within them ends the answer, and nothing after it is shown.
        done = await engine.generate("q", regex="begin: (one|two)hundred", stop=["gin"], seed=1)
        assert (done.text, done.finish_reason) == ("be", "stop")
        done = await engine.generate(
            "q", regex="begin: (one|two)hundred", stop_token_ids=[ord("i")], seed=1
        )
        assert (done.text, done.finish_reason, len(done.token_ids)) == ("beg", "stop", 4)
        # With logprobs each token is drawn, to the same text.
        done = await engine.generate("q", regex="begin: (one|two)hundred", logprobs=0, seed=1)
        assert len(done.logprobs) == len(done.token_ids) == len(whole.token_ids)


@pytest.mark.parametrize("buffer", [1, 2, 5])
async def test_a_small_buffer_is_never_overrun(buffer: int) -> None:
    async with Engine(FakeModel()) as engine:
        options: dict[str, Any] = {"regex": "[ab]" + "x" * 30 + "[ab]", "buffer": buffer}
        async with engine.stream("q", on_full="pause", **options) as stream:
            chunks = [chunk async for chunk in stream]
        assert max(len(chunk.token_ids) for chunk in chunks) <= buffer
        assert len("".join(chunk.text for chunk in chunks)) == 32


async def test_cancelled_anywhere_nothing_is_left(open_engine: OpenEngine) -> None:
    async with open_engine(FakeModel()) as engine:
        for chunks in range(12):
            async with engine.stream(
                "q", json_schema=PERSON, max_tokens=900, seed=2, n=2
            ) as stream:
                for _ in range(chunks):
                    await anext(stream)
        done = await engine.generate("q", json_schema=PERSON, max_tokens=900, seed=2)
        assert is_person(done.parsed)


# fault 41
async def test_a_wrong_format_is_refused_and_the_engine_goes_on(open_engine: OpenEngine) -> None:
    async with open_engine(FakeModel()) as engine:
        for options in (
            {"regex": "["},
            {"json_schema": {"type": "text"}},
            {"grammar": 'start: "a" b'},
            {"regex": "a{1000000}"},
        ):
            good = engine.generate("q", regex="[ab]{20}")
            results = await asyncio.gather(
                engine.generate("q", **options), good, return_exceptions=True
            )
            assert isinstance(results[0], InvalidRequest)
            assert results[1].finish_reason == "stop"
        assert engine.stats().failed == 0


# fault 41
async def test_what_takes_too_much_work_on_the_way_fails_alone(open_engine: OpenEngine) -> None:
    async with open_engine(FakeModel()) as engine:
        bomb = "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"
        bad, good = await asyncio.gather(
            engine.generate("q", regex=bomb, max_tokens=2000),
            engine.generate("q", regex="[ab]{20}"),
            return_exceptions=True,
        )
        if isinstance(bad, BaseException):
            assert isinstance(bad, RequestFailed)
            assert "as its format demands" in str(bad)
        assert good.finish_reason == "stop"


# fault 42
async def test_a_draw_that_nothing_is_left_for_fails_alone() -> None:
    async with Engine() as engine:
        bad, good = await asyncio.gather(
            engine.generate("q", regex="a+b", allowed_token_ids=[5], max_tokens=9),
            engine.generate("q", choice=["x"]),
            return_exceptions=True,
        )
        assert isinstance(bad, RequestFailed)
        assert good.text == "x"


@pytest.mark.parametrize(
    "options",
    [
        {"choice": ["yes the little dog"], "bad_words": ["little dog"]},
        {"choice": ["a the b"], "allowed_token_ids": [*range(64, 256)]},
    ],
)
async def test_what_is_barred_is_not_appended(options: dict[str, Any]) -> None:
    """Where one text alone fits, its tokens were appended though they were barred; with logprobs
    the same request failed."""
    async with Engine() as engine:
        for more in ({}, {"logprobs": 0}):
            with pytest.raises(RequestFailed, match="every one is barred"):
                await engine.generate("q", max_tokens=20, temperature=0.0, **options, **more)


#: Of few tokens, for the model's sake.
SHORT = {
    "type": "object",
    "properties": {"colour_of_it": {"enum": ["red", "green"]}, "large": {"type": "boolean"}},
    "required": ["colour_of_it", "large"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_real_model_fits_too(deterministic: bool) -> None:
    async with Engine(deterministic=deterministic) as engine:
        done, scored, _ = await asyncio.gather(
            engine.generate("q", json_schema=SHORT, max_tokens=100, seed=1),
            engine.generate("q", regex="[0-9]{3}", logprobs=1),
            engine.generate("x = ", max_tokens=8),
        )
        assert done.finish_reason == "stop"
        assert done.parsed.keys() == {"colour_of_it", "large"}
        assert engine.stats().forced_tokens > 0
        assert int(scored.text) >= 0
        assert len(scored.logprobs) == len(scored.token_ids)
        if deterministic:
            alone = await engine.generate("q", json_schema=SHORT, max_tokens=100, seed=1)
            assert alone.token_ids == done.token_ids


async def test_the_library_is_asked_for_nothing_without_need() -> None:
    async with Engine(FakeModel()) as engine:
        await engine.generate("q", max_tokens=5)
        assert core_of(engine).grammars.counters.masks == 0
        assert engine.stats().grammars_compiled == 0


class _Unhashable:
    """A schema's type by what it can, though it is none that a dictionary takes."""

    __hash__ = None  # type: ignore[assignment]

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def validate_json(self, text: str) -> Any:
        return json.loads(text)


class _Raising(_Unhashable):
    def __hash__(self) -> int:
        raise ZeroDivisionError


async def test_a_type_without_a_hash_holds_no_place() -> None:
    async with Engine(FakeModel()) as engine:
        done = await engine.generate("q", json_schema=_Unhashable(), max_tokens=20)
        assert done.parsed in (True, False)
        with pytest.raises(ZeroDivisionError):
            await engine.generate("q", json_schema=_Raising(), max_tokens=20)
        assert places(engine) == 0
