"""What ends an answer, or its reasoning, early, and in which pieces it comes."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest
from support import OpenEngine, Until

from asyncinfer import Engine, InvalidRequest, RequestFailed, SamplingParams
from asyncinfer.engine.repetition import LoopDetector
from asyncinfer.testing import FakeModel, StepGate

pytestmark = pytest.mark.asyncio


def looped(tokens: list[int], most: int, times: int) -> int | None:
    """By trying: tokens after which a loop is complete."""
    for end in range(1, len(tokens) + 1):
        for size in range(1, most + 1):
            last = tokens[max(0, end - size * times) : end]
            if len(last) == size * times and last == last[:size] * times:
                return end
    return None


async def test_a_loop_is_found_where_trying_finds_it() -> None:
    chooser = random.Random(1)
    found = 0
    for _ in range(300):
        most, times = chooser.randint(1, 7), chooser.randint(2, 4)
        tokens = [chooser.randint(0, 2) for _ in range(chooser.randint(0, 12))]
        loop = [chooser.randint(0, 2) for _ in range(chooser.randint(1, 8))]
        tokens += loop * chooser.randint(1, 5)
        detector = LoopDetector(most, times)
        ends = [end for end, token in enumerate(tokens, 1) if detector.push(token)]
        expected = looped(tokens, most, times)
        assert (ends[0] if ends else None) == expected
        found += expected is not None
    assert 100 < found < 300


async def test_a_loop_ends_the_answer_and_says_so(open_engine: OpenEngine) -> None:
    # Two tokens can be drawn, and greedy ones of the fake model depend on all before.
    async with open_engine(FakeModel()) as engine:
        options: dict[str, Any] = {"max_tokens": 400, "seed": 3}
        options |= {"temperature": 1.0, "regex": "[ab]{400}"}
        whole, ended = await asyncio.gather(
            engine.generate("x", **options), engine.generate("x", **options, repetition_stop=(3, 4))
        )
        assert whole.finish_reason in ("stop", "length")
        assert ended.finish_reason == "repetition"
        at = looped(list(whole.token_ids), 3, 4)
        assert ended.token_ids == whole.token_ids[:at]


@pytest.mark.parametrize("interval", [1, 7])
async def test_an_expression_ends_the_answer_before_its_first_match(interval: int) -> None:
    async with Engine(FakeModel()) as engine:
        options: dict[str, Any] = {"max_tokens": 120, "seed": 5, "temperature": 1.0}
        options |= {"regex": "[abc1]{120}"}
        whole = (await engine.generate("x", **options)).text
        pattern = "a[bc]{1,2}1"
        match = re.search(pattern, whole)
        assert match is not None
        texts = []
        stream = engine.stream("x", **options, stop_regex=pattern, stream_interval=interval)
        async with stream:
            async for chunk in stream:
                texts.append(chunk.text)
                assert re.search(pattern, "".join(texts)) is None
        assert "".join(texts) == whole[: match.start()]
        assert (chunk.finish_reason, chunk.stop_reason) == ("stop", match.group())
        shown = await engine.generate("x", **options, stop_regex=[pattern], include_stop=True)
        assert (shown.text, shown.stop_reason) == (whole[: match.end()], match.group())
        stop = whole[60:64]
        shown = await engine.generate("x", **options, stop=stop, include_stop=True)
        assert (shown.text, shown.stop_reason) == (whole[: whole.index(stop) + 4], stop)


async def test_each_answer_tells_what_ended_it() -> None:
    async with Engine(FakeModel()) as engine:
        options: dict[str, Any] = {"max_tokens": 40, "seed": 5, "temperature": 1.0}
        options |= {"regex": "[ab1]{60}"}
        whole = await engine.generate("x", **options, n=4)
        assert {(each.finish_reason, each.stop_reason) for each in whole.choices} == {
            ("length", None)
        }
        stops = ["aab", "1b", "bab"]
        done = await engine.generate("x", **options, n=4, stop=stops, stop_token_ids=[ord("1")])
        assert done.stop_reason == done.choices[0].stop_reason
        ends = set()
        for long, short in zip(whole.choices, done.choices, strict=True):
            places = {stop: long.text.find(stop) for stop in ["1", *stops] if stop in long.text}
            first = min(places, key=lambda stop: places[stop] + len(stop))
            assert short.stop_reason == (ord("1") if first == "1" else first)
            assert (short.text, short.finish_reason) == (long.text[: places[first]], "stop")
            ends.add(first)
        assert len(ends) > 1
        # The model's own end, and the end of a format, were not asked for.
        done = await engine.generate("x", regex="ab")
        assert (done.finish_reason, done.stop_reason) == ("stop", None)
    async with Engine(FakeModel(eos_every=10)) as engine:
        done = await engine.generate("x", max_tokens=900)
        assert (done.finish_reason, done.stop_reason) == ("stop", None)


@pytest.mark.parametrize("on_full", ["pause", "coalesce"])
async def test_chunks_that_are_merged_or_scored_tell_it_too(on_full: str) -> None:
    async with Engine(FakeModel()) as engine:
        options: dict[str, Any] = {"regex": "[ab1]{60}", "stop": ["aab", "1b"], "seed": 5}
        whole = await engine.generate("x", **options)
        asked = {"logprobs": 0} if on_full == "pause" else {"buffer": 1}
        async with engine.stream("x", **options, **asked, on_full=on_full) as stream:
            chunks = [chunk async for chunk in stream]
        assert whole.stop_reason in options["stop"]
        assert [chunk.stop_reason for chunk in chunks[-1:]] == [whole.stop_reason]
        assert not any(chunk.stop_reason for chunk in chunks[:-1])


async def test_a_special_token_that_is_a_stop_string_ends_the_answer() -> None:
    """Its text is never shown, and so was never found."""
    async with Engine() as engine:
        text = "<|endoftext|>"
        special, letter = engine.tokenizer.encode(f"{text}a", add_special_tokens=False)
        options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 60, "seed": 1}
        options |= {"stop": ["\n", text], "allowed_token_ids": [letter, special]}
        options |= {"logit_bias": {letter: 1e4, special: 1e4}, "temperature": 1e6}
        for least in (0, 20):
            done = await engine.generate("x", **options, min_tokens=least)
            assert (done.finish_reason, done.stop_reason) == ("stop", text)
            assert done.token_ids == (*[letter] * len(done.text), special)
            assert done.text == "a" * len(done.text)
            assert len(done.text) >= least


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"stop": "<s>user"}, ("ab", "<s>user")),
        ({"stop": ["\n", "b<s>us"]}, ("a", "b<s>us")),
        ({"stop": "b<s>us", "include_stop": True}, ("abus", "b<s>us")),
        ({"stop": ["<s>user", "<s>us"], "min_tokens": 5, "n": 2}, ("ab", "<s>us")),
        # What does not come is shown, but for the special token.
        ({"stop": "b<s>ux"}, ("abuser", None)),
        ({"stop": "<s>users"}, ("abuser", None)),
        ({"stop": "<s>x", "stop_regex": "bu|b.u"}, ("a", "bu")),
        ({"stop": ["<s>user", "<s>"]}, ("ab", "<s>")),
    ],
)
async def test_a_special_token_may_be_part_of_a_stop_string(
    options: dict[str, Any], shown: tuple[str, str | None]
) -> None:
    async with Engine(FakeModel()) as engine:
        written = 'start: "ab" <[256]> "user"'
        done = await engine.generate("x", grammar=written, max_tokens=50, **options)
        assert [(each.text, each.stop_reason) for each in done.choices] == [shown] * len(
            done.choices
        )


async def test_an_expression_that_takes_too_much_work_fails_its_own_request(
    open_engine: OpenEngine,
) -> None:
    async with open_engine(FakeModel()) as engine:
        options: dict[str, Any] = {"max_tokens": 3000, "seed": 5, "temperature": 1.0}
        options |= {"regex": "[ab]{3000}"}
        hard = engine.generate("x", **options, stop_regex="(a|b)*a(a|b){14}c")
        failed, done = await asyncio.gather(
            hard, engine.generate("y", max_tokens=50), return_exceptions=True
        )
        assert isinstance(failed, RequestFailed)
        assert "stop_regex" in str(failed)
        assert len(done.token_ids) == 50
        assert len((await engine.generate("y", max_tokens=50)).token_ids) == 50


@pytest.mark.parametrize("interval", [1, 3, 64])
@pytest.mark.parametrize("n", [1, 3])
async def test_an_interval_gives_the_same_answer_in_fewer_pieces(interval: int, n: int) -> None:
    async with Engine(FakeModel()) as engine:
        options: dict[str, Any] = {"max_tokens": 50, "seed": 1, "n": n, "temperature": 1.0}
        options |= {"logprobs": 2, "ignore_eos": True}
        whole = await engine.generate("x", **options)
        stream = engine.stream("x", **options, stream_interval=interval)
        sizes: list[list[int]] = [[] for _ in range(n)]
        async with stream:
            async for chunk in stream:
                sizes[chunk.index].append(len(chunk.token_ids))
                assert len(chunk.logprobs) == len(chunk.token_ids)
            done = await stream
        assert done.choices == whole.choices
        for each in sizes:
            assert each[0] == 1
            assert set(each[1:-1]) <= {interval}
            assert sum(each) == 50


async def test_a_stopped_stream_gives_what_waited_for_its_chunk(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        stream = engine.stream("x", max_tokens=5000, stream_interval=200, ignore_eos=True)
        async with stream:
            first = await anext(stream)
            assert len(first.token_ids) == 1
            await asyncio.sleep(0)
            stream.stop()
            done = await stream
        assert done.finish_reason == "stopped"
        assert len(done.token_ids) == done.usage.completion_tokens


@pytest.mark.parametrize("overlap", [1, 2])
async def test_a_thinking_budget_closes_the_reasoning(
    overlap: int, gate: StepGate, until: Until
) -> None:
    closing = tuple(b"</think>")
    gate.close()
    model = FakeModel(blocks=64, max_context=512, gate=gate)
    async with Engine(model, overlap=overlap) as engine:
        options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "ignore_eos": True}

        async def think(seed: int, budget: int) -> None:
            done = await engine.generate(
                "why?<think>\n", **options, seed=seed, thinking_budget=budget
            )
            free = await engine.generate("why?<think>\n", **options, seed=seed)
            # A character that has begun is ended first.
            starts = range(budget, budget + 9)
            at = next(i for i in starts if done.token_ids[i : i + 8] == closing)
            assert done.token_ids[:at] == free.token_ids[:at]
            assert at == budget or done.token_ids[budget - 1] >= 0x80
            assert len(done.token_ids) == 60
            assert b"</think>" not in bytes(t for t in done.token_ids[at + 8 :] if t < 256)

        # Twice as many tokens as there is room for, all there before the first step.
        others = [
            engine.generate(f"{i}", max_tokens=200, seed=i, ignore_eos=True) for i in range(12)
        ]
        answers = asyncio.gather(*others, *[think(seed, 3 + 5 * seed) for seed in range(4)])
        await until(lambda: engine.stats().running + engine.stats().waiting == 16)
        gate.open()
        await answers
        assert engine.stats().preemptions > 0


async def test_after_a_budget_the_format_holds() -> None:
    async with Engine(FakeModel()) as engine:

        async def think(seed: int) -> int:
            done = await engine.generate(
                "why?<think>",
                regex="[0-9]{5}",
                constrain_after="</think>",
                thinking_budget=5 + seed,
                temperature=1.0,
                seed=seed,
                max_tokens=80,
            )
            assert re.fullmatch(r"[0-9]{5}", done.text.rpartition("</think>")[2])
            assert done.finish_reason == "stop"
            return bytes(done.token_ids[:-1]).index(b"</think>") - 5 - seed

        # Many end within a character of several bytes.
        late = await asyncio.gather(*map(think, range(24)))
        assert min(late) == 0
        assert 0 < max(late) <= 3


async def test_given_tokens_have_the_logprobs_that_all_have() -> None:
    async with Engine(max_context=64) as engine:
        ids = (5, 300, 17, 99, 4000)
        prompt = "def add(a, b):"
        every, some, one = await asyncio.gather(
            engine.generate(prompt, max_tokens=6, logprobs=128),
            engine.generate(prompt, max_tokens=6, logprob_token_ids=ids),
            engine.generate(prompt, max_tokens=6, logprob_token_ids=[7]),
        )
        assert some.token_ids == one.token_ids == every.token_ids
        for a, b, c in zip(every.logprobs, some.logprobs, one.logprobs, strict=True):
            assert (b.token_id, b.rank) == (a.token_id, a.rank)
            assert b.logprob == pytest.approx(a.logprob, abs=1e-5)
            assert {token for token, _ in b.top} == set(ids)
            assert [token for token, _ in c.top] == [7]
            assert [each for _, each in b.top] == sorted((v for _, v in b.top), reverse=True)
        # Those that the most likely ones leave out are worked out by themselves.
        best = [token for token, _ in every.logprobs[0].top]
        chosen = engine.generate(prompt, max_tokens=1, logprob_token_ids=best)
        top = (await chosen).logprobs[0].top
        assert dict(top) == pytest.approx(dict(every.logprobs[0].top), abs=1e-5)
        # Deterministic engines draw row by row.
    async with Engine(max_context=128, deterministic=True) as engine:
        both = await asyncio.gather(
            engine.generate(prompt, max_tokens=2, logprob_token_ids=best),
            engine.generate(prompt, max_tokens=2, logprobs=3),
        )
        assert dict(both[0].logprobs[0].top) == pytest.approx(dict(top), abs=1e-4)
        assert len(both[1].logprobs[0].top) == 3


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"stop_regex": "("}, "stop_regex"),
        ({"stop_regex": ["a", "b*"]}, "stop_regex"),
        ({"stop_regex": 1}, "stop_regex"),
        ({"repetition_stop": 3}, "repetition_stop"),
        ({"repetition_stop": (0, 3)}, "repetition_stop"),
        ({"repetition_stop": (3, 1)}, "repetition_stop"),
        ({"thinking_budget": 0}, "thinking_budget"),
        ({"thinking_budget": 5, "logprobs": 0}, "thinking_budget"),
        ({"thinking_budget": 5, "regex": "a"}, "thinking_budget"),
        ({"thinking_budget": 5, "buffer": 8}, "buffer"),
        ({"thinking_tags": ("a",)}, "thinking_tags"),
        ({"logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprob_token_ids": [10**6]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "logprobs": 1}, "logprob_token_ids"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"stream_interval": 9, "buffer": 8}, "stream_interval"),
        ({"include_stop": 1}, "include_stop"),
    ],
)
async def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match=re.escape(field)):
            await engine.generate("x", **options)
        assert (await engine.generate("x", max_tokens=2)).usage.completion_tokens == 2


async def test_kept_as_they_were_checked() -> None:
    params = SamplingParams(repetition_stop=[2, 3], stop_regex="a", thinking_tags=["a", "b"])  # type: ignore[arg-type]
    assert hash(params) is not None
    assert params.repetition_stop == (2, 3)
    assert params.stop_regex == ("a",)
