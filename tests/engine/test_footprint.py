"""What requests hold in bytes is bounded, and given back however a request ends."""

from __future__ import annotations

import json
import logging
from sys import getsizeof
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from support import core_of

from asyncinfer import Engine, InvalidRequest, Overloaded, RequestFailed, SamplingParams
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.beam_search import BeamOutput
from asyncinfer.engine.footprint import (
    beam_bytes,
    logprob_bytes,
    matcher_bytes,
    prepared_bytes,
    submitted_bytes,
)
from asyncinfer.engine.request import Request
from asyncinfer.grammar import Matcher
from asyncinfer.grammar import matcher_size as matcher_size_module
from asyncinfer.testing import FakeModel
from asyncinfer.text import ChatTemplate, StopStrings

TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
CHUNK = submitted_bytes("", 1) - submitted_bytes("", 0)


def test_a_text_counts_as_it_lies_in_memory() -> None:
    for text in ("", "plain " * 1000, "é" * 1000, "日本" * 1000, "🙂" * 1000):
        assert submitted_bytes(text, 0) == getsizeof(text)


def test_token_ids_count_as_objects() -> None:
    ids = list(range(1000, 2000))
    held = getsizeof(ids) + sum(map(getsizeof, ids))
    assert held <= submitted_bytes(ids, 0) <= 1.2 * held


def test_messages_count_by_their_texts() -> None:
    text = "x" * 5000
    parts = [{"type": "text", "text": text}, {"type": "image"}]
    messages = [{"role": "user", "content": text}, {"role": "user", "content": parts}, 7]
    assert 2 * getsizeof(text) < submitted_bytes(messages, 0) < 2.5 * getsizeof(text)
    # Its parts are two texts now.
    arguments = {"all": [{"of": text[1:]}, *parts]}
    called = [{"function": {"name": "f", "arguments": arguments}}]
    told = {"role": "assistant", "content": "", "reasoning": text[2:], "tool_calls": called}
    more = submitted_bytes([*messages, told], 0) - submitted_bytes(messages, 0)
    assert 3 * getsizeof(text) < more < 3.5 * getsizeof(text)


def test_what_holds_itself_is_refused() -> None:
    message: dict[str, object] = {"role": "user", "content": "x"}
    message["x"] = [message]
    with pytest.raises(InvalidRequest, match="at most 64 levels deep"):
        submitted_bytes([message], 0)


@pytest.mark.anyio
async def test_a_negative_prompt_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, enter = [], Admission.enter

    def noted(self: Admission, request: Request) -> None:
        entered.append(request.held_bytes)
        enter(self, request)

    monkeypatch.setattr(Admission, "enter", noted)
    async with Engine(FakeModel()) as engine:
        for text in ("x", "x" * 901):
            await engine.generate("a", max_tokens=4, guidance_scale=2.0, negative_prompt=text)
    assert entered[1] - entered[0] == 900


@pytest.mark.anyio
async def test_lists_of_tokens_among_the_options_are_charged() -> None:
    """A request may name 65,536 tokens in each, which take more than any short prompt."""
    many = range(258)
    lists: list[dict[str, Any]] = [
        {"stop_token_ids": many},
        {"allowed_token_ids": many},
        {"logit_bias": dict.fromkeys(many, 1.0)},
    ]
    held: list[int] = []
    async with Engine(FakeModel(gate=lambda *_: held.append(engine.stats().held_bytes))) as engine:
        await engine.generate("a", max_tokens=1)
        plain = held[-1]
        for options in lists:
            await engine.generate("a", max_tokens=1, **options)
            (given,) = options.values()
            assert held[-1] - plain >= getsizeof((*given,)) + 28 * len(given)
        assert engine.stats().held_bytes == 0


@pytest.mark.anyio
async def test_a_beam_search_is_charged_for_no_more_tokens_than_there_are() -> None:
    async with Engine(FakeModel(), max_held_bytes=32 << 20) as engine:
        done = await engine.beam_search("a", beams=64, max_tokens=2, stop_token_ids=range(258))
    assert len(done.choices) == 64


@pytest.mark.parametrize("prompt", [None, 7, [], (), [{}], {"a": 1}])
def test_what_is_no_prompt_counts_as_nothing(prompt: object) -> None:
    assert submitted_bytes(prompt, 0) == 0


def test_a_prepared_prompt_counts_for_each_answer() -> None:
    one, four = (prepared_bytes(1000, 62, SamplingParams(n=n)) for n in (1, 4))
    assert four - one == 3 * 8 * 1062
    scored = prepared_bytes(1000, 62, SamplingParams(prompt_logprobs=5))
    assert scored - one == 1000 * 4 * (3 + 2 * 5)


@pytest.mark.anyio
async def test_a_prompt_at_the_bound_is_taken_and_one_past_it_never() -> None:
    ids = [200] * 40
    exact = submitted_bytes(ids, 4) + prepared_bytes(40, 2, SamplingParams())
    for most, field in ((exact, None), (exact - 1, "prompt"), (CHUNK, "prompt")):
        async with Engine(FakeModel(), max_held_bytes=most) as engine:
            if field is None:
                await engine.generate(ids, max_tokens=4)
            else:
                with pytest.raises(InvalidRequest, match=f"max_held_bytes={most}") as caught:
                    await engine.generate(ids, max_tokens=4)
                assert caught.value.field == field
            stats = engine.stats()
            assert (stats.held_bytes, stats.refused) == (0, 0)


async def check_charged(exact: int, ids: list[int], **options: Any) -> None:
    """A request is charged so many bytes, and gives them back."""
    for most, fits in ((exact, True), (exact - 1, False)):
        async with Engine(FakeModel(), max_held_bytes=most) as engine:
            asked = engine.generate(ids, **options)
            if fits:
                await asked
            else:
                with pytest.raises(InvalidRequest, match=f"max_held_bytes={most}"):
                    await asked
            assert engine.stats().held_bytes == 0


@pytest.mark.anyio
async def test_stop_strings_at_the_bound_are_taken_and_one_past_it_never() -> None:
    ids, stops = [200] * 40, tuple("a" * 4000 + chr(0x100 + each) for each in range(64))
    strings = StopStrings.held_bytes(stops, 4)
    assert strings > 64 * 4000 * 7
    exact = submitted_bytes(ids, 16) + prepared_bytes(40, 2, SamplingParams(n=4)) + strings
    await check_charged(exact, ids, max_tokens=4, n=4, stop=stops)


@pytest.mark.anyio
async def test_logprobs_of_answers_are_charged() -> None:
    ids, params = [200] * 40, SamplingParams(n=2, logprobs=5, max_tokens=8)
    exact = submitted_bytes(ids, 16) + prepared_bytes(40, 2, params) + logprob_bytes(8, params)
    assert logprob_bytes(8, params) == 2 * 8 * 4 * (3 + 2 * 5)
    assert logprob_bytes(8, SamplingParams()) == 0
    await check_charged(exact, ids, max_tokens=8, n=2, logprobs=5)


@pytest.mark.anyio
async def test_what_finds_no_room_is_overloaded_until_somebody_leaves() -> None:
    async with Engine(FakeModel(), max_held_bytes=10 * CHUNK) as engine:
        # A full buffer keeps it from ending.
        async with engine.stream("hello", max_tokens=500, buffer=8) as stream:
            await anext(stream)
            held = engine.stats().held_bytes
            assert 8 * CHUNK < held <= 10 * CHUNK
            with pytest.raises(Overloaded, match="max_held_bytes=2560: requests hold"):
                await engine.generate("more", max_tokens=4)
            stats = engine.stats()
            assert (stats.held_bytes, stats.refused) == (held, 1)
        await engine.generate("more", max_tokens=4)
        assert engine.stats().held_bytes == 0


@pytest.mark.anyio
@pytest.mark.parametrize("length", [800, 3000], ids=["on the spot", "by a worker"])
async def test_a_prompt_for_whose_token_ids_there_is_no_room_is_refused_once(
    length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As token ids a text takes many times its bytes."""
    caplog.set_level(logging.INFO, "asyncinfer")
    text = "a" * length
    alone = submitted_bytes(text, 4) + prepared_bytes(length, length // 16, SamplingParams())
    async with Engine(FakeModel(max_context=4096), max_held_bytes=alone + CHUNK) as engine:
        await engine.generate(text, max_tokens=4)
        async with engine.stream("hello", max_tokens=500, buffer=8) as stream:
            await anext(stream)
            with pytest.raises(Overloaded, match="max_held_bytes"):
                await engine.generate(text, max_tokens=4)
            stats = engine.stats()
            assert 8 * CHUNK < stats.held_bytes <= 10 * CHUNK
            assert stats.refused == 1
        assert engine.stats().aborted == 1
    events = [record.asyncinfer["event"] for record in caplog.records]  # type: ignore[attr-defined]
    assert events.count("request_refused") == 1


@pytest.mark.anyio
async def test_whatever_ends_a_request_gives_its_bytes_back() -> None:
    async with Engine(FakeModel()) as engine:
        await engine.generate("to its end", max_tokens=4)
        with pytest.raises(InvalidRequest):
            await engine.generate([1] * 1_000_000, max_tokens=4)
        async with engine.stream("left", max_tokens=500, buffer=2) as stream:
            await anext(stream)
        with anyio.move_on_after(0):
            # Long enough for a worker thread.
            await engine.generate("x" * 3000, max_tokens=4)
        with anyio.fail_after(120):
            while engine.stats().held_bytes:
                await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_matchers_are_charged() -> None:
    # A format's characters, times the answers: the prompt itself is small.
    choices = ["a" * 1000, "b" * 1000]
    chars = len(json.dumps(choices))
    held = matcher_bytes(chars, 4)
    assert held > 2 * 4 * chars
    async with Engine(FakeModel(), max_held_bytes=held) as engine:
        with pytest.raises(InvalidRequest, match="max_held_bytes"):
            await engine.generate("q", choice=choices, n=4, max_tokens=2)
        done = await engine.generate("q", choice=choices, n=2, max_tokens=2)
        assert len(done.choices) == 2
        assert engine.stats().held_bytes == 0


@pytest.mark.anyio
@pytest.mark.parametrize("told", [True, False], ids=["measured", "estimated"])
async def test_what_matchers_grow_by_is_charged(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not told:
        # As a C library that does not say what it has given away.
        monkeypatch.setattr(matcher_size_module, "_allocated", None)
    held: list[int] = []

    def measure(*_: object) -> None:
        held.append(engine.stats().held_bytes)

    options: dict[str, Any] = {"regex": "(ab|cd){400}", "n": 2, "buffer": 1000}
    async with Engine(FakeModel(gate=measure)) as engine:
        done = await engine.generate("q", **options)
        assert [len(each.text) for each in done.choices] == [800, 800]
        assert engine.stats().held_bytes == 0
    # It took 18 bytes for each byte of this text; three quarters of which were seen to come.
    grown = held[-1] - held[0]
    assert grown > 2 * 600 * 9
    async with Engine(FakeModel(), max_held_bytes=held[0] + grown // 2) as engine:
        with pytest.raises(RequestFailed, match=r"its format takes memory: .*max_held_bytes="):
            await engine.generate("q", **options)
        assert engine.stats().held_bytes == 0
        await engine.generate("q", max_tokens=4)


@pytest.mark.anyio
async def test_what_matchers_of_beams_grow_by_is_charged_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A beam's matcher is kept beside its copies until its successors were computed."""
    charged: list[int] = []
    monkeypatch.setattr(Admission, "charge", lambda self, request, count: charged.append(count))
    monkeypatch.setattr(Matcher, "grown", lambda self: 1234567)
    async with Engine() as engine:
        await engine.generate("q", regex="(ab|cd){4}", max_tokens=2)
        assert 1234567 in charged
        charged.clear()
        await engine.beam_search("q", beams=2, regex="(ab|cd){4}", max_tokens=2)
    assert 2 * 1234567 in charged
    assert 1234567 not in charged


@pytest.mark.anyio
async def test_matchers_of_calls_are_charged() -> None:
    held: list[int] = []

    def measure(*_: object) -> None:
        held.append(engine.stats().held_bytes)

    async with Engine(FakeModel(gate=measure, template=TEMPLATE)) as engine:
        for choice in ("none", "required"):
            await engine.generate(
                [{"role": "user", "content": "q"}],
                tools=[{"name": "f", "parameters": {"type": "object"}, "description": "d" * 2000}],
                tool_choice=choice,
                max_tokens=1,
            )
    assert held[-1] - held[0] > matcher_bytes(2000, 1)


@pytest.mark.anyio
async def test_a_beam_search_is_charged_for_what_it_holds_at_its_longest() -> None:
    prompt, beams, most = [200] * 40, 8, 60
    held: list[int] = []

    def measure(phase: str, step: object) -> None:
        (request,) = core_of(engine).requests.live
        mine: list[object] = []
        for beam in request.outputs:
            assert isinstance(beam, BeamOutput)
            following = beam.following or []
            mine += [beam.sequence.tokens, beam.sequence.keys, following, *following]
            mine += [number for entry in following for number in entry[:2]]
        held.append(sum(map(getsizeof, mine)))

    async with Engine(FakeModel(gate=measure)) as engine:
        done = await engine.beam_search(prompt, beams=beams, max_tokens=most, ignore_eos=True)
    assert len(done.choices) == beams
    # Without tokens that end an answer two are looked at for each beam. Blocks have 16 tokens.
    charged = beam_bytes(beams, 2 * beams, len(prompt), most, (len(prompt) + most) // 16, 0)
    # The beams' tuples are not counted here.
    assert charged / 3 < max(held) < charged
    with_format = beam_bytes(beams, 2 * beams, len(prompt), most, 6, 1000)
    assert with_format - charged == matcher_bytes(1000, 2 * beams)


@pytest.mark.anyio
async def test_a_beam_search_at_the_bound_is_taken_and_one_past_it_never() -> None:
    ids, held = [200] * 40, []
    async with Engine(FakeModel(gate=lambda *_: held.append(engine.stats().held_bytes))) as engine:
        await engine.beam_search(ids, beams=4, max_tokens=20)
        assert engine.stats().held_bytes == 0
    plain = submitted_bytes(ids, 20) + prepared_bytes(40, 2, SamplingParams())
    assert min(held) == max(held) > plain + beam_bytes(4, 8, 40, 20, 3, 0) - 1
    for most in (held[0], held[0] - 1):
        async with Engine(FakeModel(), max_held_bytes=most) as engine:
            if most == held[0]:
                await engine.beam_search(ids, beams=4, max_tokens=20)
            else:
                with pytest.raises(InvalidRequest, match=f"max_held_bytes={most}"):
                    await engine.beam_search(ids, beams=4, max_tokens=20)
            assert engine.stats().held_bytes == 0
