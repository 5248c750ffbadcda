"""OpenAI's own clients: over a socket, in process and without an event loop, with equal results."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import openai
import pytest
from server.chat_model import CHAT, ChatModel, listening

from asyncinfer import Engine, SyncEngine, openai_client, sync_openai_client
from asyncinfer.server import create_app

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
#: What is asked of a chat, all of which gives equal answers however it is asked.
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "several": {"n": 3},
    "stopped": {"stop": ["e", "f"], "max_completion_tokens": 400},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs alone": {"logprobs": True},
    "json": {"response_format": JSON, "max_completion_tokens": 40},
    "biased": {"logit_bias": {"65": 1.0}},
    "ours": {"extra_body": {"top_k": 5, "min_p": 0.01, "choice": ["yes", "no"]}},
}


@asynccontextmanager
async def clients() -> AsyncIterator[dict[str, openai.AsyncOpenAI]]:
    async with Engine(ChatModel()) as engine:
        async with listening(create_app(engine)) as url, openai_client(engine) as inside:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as outside:
                yield {"socket": outside, "in process": inside}


async def joined(stream: openai.AsyncStream[Any]) -> tuple[dict[int, Any], Any]:
    """What a client makes of the chunks of a chat, and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    async for chunk in stream:
        if usage is not None or (chunk.usage is not None and chunk.choices):
            raise AssertionError("usage is in the last chunk, alone")
        usage = chunk.usage
        for choice in chunk.choices:
            if choice.index not in choices:
                # The reading rule of OpenAI's clients.
                assert choice.index == len(choices)
                assert choice.delta.role == "assistant"
                choices[choice.index] = {"text": "", "logprobs": [], "finish": None}
            told = choices[choice.index]
            assert told["finish"] is None
            told["text"] += choice.delta.content or ""
            if choice.logprobs is not None:
                told["logprobs"] += choice.logprobs.content
            told["finish"] = choice.finish_reason
    return choices, usage


@pytest.mark.parametrize("case", CHATS)
async def test_a_chat_is_equal_however_it_is_asked(case: str) -> None:
    options = {"max_completion_tokens": 12, "seed": 7, "model": "ChatModel", **CHATS[case]}
    found: list[Any] = []
    async with clients() as by_name:
        for client in by_name.values():
            done = await client.chat.completions.create(messages=CHAT, **options)  # type: ignore[arg-type,call-overload]
            assert done.usage.prompt_tokens == len("<system>Be brief.<user>hello<assistant>")
            told = {}
            for choice in done.choices:
                assert choice.message.role == "assistant"
                scores = [] if choice.logprobs is None else choice.logprobs.content
                told[choice.index] = {
                    "text": choice.message.content,
                    "logprobs": scores,
                    "finish": choice.finish_reason,
                }
            stream = await client.chat.completions.create(  # type: ignore[call-overload]
                messages=CHAT, stream=True, stream_options={"include_usage": True}, **options
            )
            choices, usage = await joined(stream)
            assert choices == told
            assert usage.completion_tokens == done.usage.completion_tokens
            found.append(told)
    assert found[0] == found[1]
    assert len(found[0]) == options.get("n", 1)
    if case == "json":
        assert json.loads(found[0][0]["text"])["ok"] in (True, False)
    if case == "stopped":
        assert found[0][0]["finish"] == "stop"
    if case == "ours":
        assert found[0][0]["text"] in ("yes", "no")
    if case == "logprobs":
        first = found[0][0]["logprobs"][0]
        assert len(first.top_logprobs) == 2
        assert first.token == first.top_logprobs[0].token


async def test_typed_answers_by_the_client() -> None:
    """The client's own helper makes a schema of a pydantic model."""
    from pydantic import BaseModel

    class Verdict(BaseModel):
        ok: bool

    async with Engine(ChatModel()) as engine, openai_client(engine) as client:
        done = await client.chat.completions.parse(
            model="ChatModel",
            messages=CHAT,  # type: ignore[arg-type]
            response_format=Verdict,
            seed=7,
        )
        assert isinstance(done.choices[0].message.parsed, Verdict)


async def test_a_prediction_changes_no_answer() -> None:
    options: dict[str, Any] = {"model": "ChatModel", "messages": CHAT, "temperature": 0}
    # Bytes that are no characters would be another prediction than the answer is.
    options |= {"max_completion_tokens": 24, "extra_body": {"regex": "[a-h]{24}"}}
    async with Engine(ChatModel()) as engine, openai_client(engine) as client:
        plain = await client.chat.completions.create(**options)
        text = plain.choices[0].message.content
        prediction = {"type": "content", "content": [{"type": "text", "text": text}]}
        guessed = await client.chat.completions.create(prediction=prediction, **options)
        assert guessed.choices[0].message.content == text
        details = guessed.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 20


COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "hello"},
    "ids": {"prompt": [104, 101, 108, 108, 111]},
    "texts": {"prompt": ["hello", "world"], "n": 2},
    "lists of ids": {"prompt": [[104, 101], [108]]},
    "echo": {"prompt": ["hello", [104, 101]], "echo": True},
    "logprobs": {"prompt": ["hello", "world"], "logprobs": 2},
}


@pytest.mark.parametrize("case", COMPLETIONS)
async def test_a_completion_is_equal_however_it_is_asked(case: str) -> None:
    options = {"max_tokens": 6, "seed": 7, "temperature": 1, "model": "ChatModel"}
    options |= COMPLETIONS[case]
    found: list[Any] = []
    async with clients() as by_name:
        for client in by_name.values():
            done = await client.completions.create(**options)  # type: ignore[call-overload]
            whole = {each.index: (each.text, each.finish_reason) for each in done.choices}
            scores = {each.index: each.logprobs for each in done.choices}
            stream = await client.completions.create(stream=True, **options)  # type: ignore[call-overload]
            told: dict[int, tuple[str, Any]] = {}
            tokens: dict[int, list[Any]] = {}
            async for chunk in stream:
                for choice in chunk.choices:
                    told[choice.index] = (
                        told.get(choice.index, ("", None))[0] + choice.text,
                        choice.finish_reason,
                    )
                    if choice.logprobs is not None:
                        pairs = zip(
                            choice.logprobs.tokens,
                            choice.logprobs.token_logprobs,
                            choice.logprobs.text_offset,
                            strict=True,
                        )
                        tokens.setdefault(choice.index, []).extend(pairs)
            assert told == whole
            for index, each in tokens.items():
                kept = scores[index]
                assert [one[0] for one in each] == kept.tokens
                assert [one[1] for one in each] == kept.token_logprobs
            found.append((whole, scores))
    assert found[0] == found[1]
    assert sorted(found[0][0]) == list(range(len(found[0][0])))


async def test_a_prompt_is_scored() -> None:
    """As evaluation harnesses ask for it."""
    async with Engine(ChatModel()) as engine, openai_client(engine) as client:
        done = await client.completions.create(
            model="ChatModel", prompt="hello", echo=True, logprobs=1, max_tokens=0
        )
        kept = done.choices[0].logprobs
        assert kept is not None
        assert kept.tokens == list("hello")
        assert kept.token_logprobs is not None
        assert kept.token_logprobs[0] is None
        assert all(math.isfinite(each) for each in kept.token_logprobs[1:])
        assert kept.text_offset == [0, 1, 2, 3, 4]
        assert done.choices[0].text == "hello"
        assert done.usage is not None
        assert done.usage.completion_tokens == 0


async def test_errors_are_those_of_the_client() -> None:
    async with clients() as by_name:
        for client in by_name.values():
            ask = client.with_options(max_retries=0).chat.completions.create
            with pytest.raises(openai.BadRequestError) as bad:
                await ask(model="ChatModel", messages=CHAT, temperature=-1)  # type: ignore[arg-type]
            assert bad.value.param == "temperature"
            # Agents that read this code shorten their conversation.
            with pytest.raises(openai.BadRequestError) as long:
                await ask(model="ChatModel", messages=[{"role": "user", "content": "x" * 40_000}])
            assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
            with pytest.raises(openai.NotFoundError):
                await ask(model="gpt-9", messages=CHAT)  # type: ignore[arg-type]
            with pytest.raises(openai.InternalServerError, match="deadline"):
                await ask(
                    model="ChatModel",
                    messages=CHAT,  # type: ignore[arg-type]
                    max_tokens=4000,
                    extra_body={"deadline": 0.001, "ignore_eos": True},
                )


async def test_the_clients_of_programs_without_a_loop() -> None:
    def work() -> list[str]:
        with SyncEngine(ChatModel()) as engine, sync_openai_client(engine) as client:
            done = client.chat.completions.create(
                model="ChatModel",
                messages=CHAT,  # type: ignore[arg-type]
                max_tokens=8,
                seed=1,
            )
            text = ""
            with client.chat.completions.create(
                model="ChatModel",
                messages=CHAT,  # type: ignore[arg-type]
                max_tokens=8,
                seed=1,
                stream=True,
            ) as stream:
                for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
            with client.chat.completions.create(
                model="ChatModel",
                messages=CHAT,  # type: ignore[arg-type]
                max_tokens=4000,
                stream=True,
            ) as stream:
                next(stream)
            assert engine.stats().aborted == 1
            assert engine.tokenizer.count("hello") == 5
            assert engine.model.name == "ChatModel"
            return [done.choices[0].message.content or "", text]

    whole, streamed = await anyio.to_thread.run_sync(work)
    assert whole == streamed != ""


async def test_embeddings() -> None:
    """Floats and base64, which is what the client asks for by itself, are the same."""
    async with Engine() as engine:
        want = (await engine.embed(["hello", "you"])).vectors
        few = (await engine.embed(["hello"], pooling="mean", dimensions=8)).vectors
        async with listening(create_app(engine)) as url, openai_client(engine) as inside:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as outside:
                for client in (inside, outside):
                    for form in ({}, {"encoding_format": "float"}):
                        done = await client.embeddings.create(
                            model=engine.model.name,
                            input=["hello", "you"],
                            **form,  # type: ignore[arg-type]
                        )
                        for index, each in enumerate(done.data):
                            assert each.index == index
                            assert each.embedding == pytest.approx(want[index].tolist(), abs=1e-4)
                        tokens = sum(engine.tokenizer.count(text) for text in ("hello", "you"))
                        assert done.usage.prompt_tokens == done.usage.total_tokens == tokens
                    cut = await client.embeddings.create(
                        model=engine.model.name,
                        input="hello",
                        dimensions=8,
                        extra_body={"pooling": "mean"},
                    )
                    assert cut.data[0].embedding == pytest.approx(few[0].tolist(), abs=1e-4)
                    with pytest.raises(openai.BadRequestError) as found:
                        await client.embeddings.create(
                            model=engine.model.name, input="a", dimensions=1 << 20
                        )
                    assert found.value.param == "dimensions"
                    with pytest.raises(openai.BadRequestError) as found:
                        await client.embeddings.create(model=engine.model.name, input=["a", []])  # type: ignore[list-item]
                    assert found.value.param == "input[1]"
