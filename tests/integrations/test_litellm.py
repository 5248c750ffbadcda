"""LiteLLM's provider on an engine in this process: an agent, streams, embeddings, errors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from integrations.scripts import ANSWER, QUESTION, agent, temperature
from server.chat_model import ChatModel
from support import Until, places

# Else it asks another host for its list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
pytest.importorskip("litellm", exc_type=ImportError)
# It imports this for every request that has tools.
pytest.importorskip("mcp")

import litellm

from asyncinfer import Engine, SyncEngine
from asyncinfer.integrations.litellm import LiteLLMProvider
from asyncinfer.testing import ScriptedModel

# What it imports warns of what is its own to change.
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore")]

TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
MODEL = "asyncinfer/ScriptedModel"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(litellm, "custom_provider_map", [])
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    yield
    # What it logs of a call is told by tasks of its own.
    litellm.logging_callback_manager._reset_all_callbacks()


def provide(engine: Any, **options: Any) -> None:
    handler = LiteLLMProvider(engine, **options)
    litellm.custom_provider_map = [{"provider": "asyncinfer", "custom_handler": handler}]


def add(chat: list[Any], message: Any) -> bool:
    """Add an answer and the results of its calls; returns whether there were any."""
    chat.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        result = temperature(**json.loads(call.function.arguments))
        chat.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return bool(message.tool_calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_runs_its_tools_to_the_end(stream: bool) -> None:
    chat: list[Any] = [{"role": "user", "content": QUESTION}]
    usage = {"include_usage": True} if stream else None
    async with Engine(ScriptedModel(agent)) as engine:
        provide(engine)
        for _ in range(2):
            done = await litellm.acompletion(
                MODEL, chat, tools=[TOOL], stream=stream, stream_options=usage, top_k=9
            )
            if stream:
                chunks = [chunk async for chunk in done]
                assert len(chunks) > 5
                done = litellm.stream_chunk_builder(chunks, messages=chat)
            (choice,) = done.choices
            called = add(chat, choice.message)
            assert choice.finish_reason == ("tool_calls" if called else "stop")
            if called:
                assert choice.message.reasoning_content == "I need the weather."
        assert choice.message.content == ANSWER
        assert done.usage.prompt_tokens_details.cached_tokens > 0
        assert done.usage.completion_tokens > 10


async def test_a_program_without_an_event_loop() -> None:
    def work() -> None:
        chat: list[Any] = [{"role": "user", "content": QUESTION}]
        with SyncEngine(ScriptedModel(agent)) as engine:
            provide(engine)
            done = litellm.completion(MODEL, chat, tools=[TOOL])
            assert add(chat, done.choices[0].message)
            chunks = [*litellm.completion(MODEL, chat, tools=[TOOL], stream=True)]
            done = litellm.stream_chunk_builder(chunks, messages=chat)
            assert done.choices[0].message.content == ANSWER

    await anyio.to_thread.run_sync(work)


async def test_options_and_formats() -> None:
    texts = ["Rome and more", '{"ok": true}', '{"ok": "maybe"}']
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    chat = [{"role": "user", "content": "Hm?"}]
    async with Engine(ScriptedModel(texts)) as engine:
        provide(engine, stop=["more"])
        done = await litellm.acompletion(MODEL, chat, extra_body={"min_p": 0.1}, max_tokens=40)
        assert done.choices[0].message.content == "Rome and "
        done = await litellm.acompletion(MODEL, chat, response_format=form)
        assert json.loads(done.choices[0].message.content) == {"ok": True}
        with pytest.raises(litellm.InternalServerError, match="does not fit"):
            await litellm.acompletion(MODEL, chat, response_format=form)


async def test_embeddings() -> None:
    async with Engine() as engine:
        provide({"one": engine})
        done = await litellm.aembedding("asyncinfer/one", input=["hello", "you"])
        want = (await engine.embed(["hello", "you"])).vectors
        assert [each["index"] for each in done.data] == [0, 1]
        for each, vector in zip(done.data, want, strict=True):
            assert each["embedding"] == pytest.approx(vector.tolist(), abs=1e-4)
        assert done.usage.prompt_tokens > 0


async def test_errors_are_those_of_litellm(until: Until) -> None:
    chat = [{"role": "user", "content": "Hm?"}]
    long = [{"role": "user", "content": "word " * 5000}]
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    asked: list[tuple[type[Exception], dict[str, Any], str]] = [
        (litellm.BadRequestError, {"temperature": -1}, "temperature=-1"),
        (litellm.BadRequestError, {"temprature": 1}, "did you mean temperature"),
        (litellm.BadRequestError, {"messages": picture}, "images cannot be read"),
        (litellm.ContextWindowExceededError, {"messages": long}, "context"),
        (litellm.NotFoundError, {"model": "asyncinfer/gpt-9"}, "there are: ChatModel"),
        (litellm.Timeout, {"timeout": 0.001, "max_tokens": 3000, "ignore_eos": True}, "deadline"),
    ]
    async with Engine(ChatModel(), max_requests=1) as engine:
        provide(engine)
        for kind, changed, message in asked:
            options = {"model": "asyncinfer/ChatModel", "messages": chat, **changed}
            with pytest.raises(kind, match=message):
                await litellm.acompletion(**options)
        await until(lambda: places(engine) == 0)
        async with engine.stream("hold", max_tokens=3000):
            with pytest.raises(litellm.RateLimitError):
                await litellm.acompletion("asyncinfer/ChatModel", chat)
        with pytest.raises(Exception, match="take a SyncEngine"):
            litellm.completion("asyncinfer/ChatModel", chat)


async def test_a_timeout_is_no_deadline_of_a_stream() -> None:
    """LiteLLM gives one of ten minutes where the caller gave none."""
    async with Engine(ScriptedModel(["word " * 400])) as engine:
        provide(engine)
        options = {"messages": [{"role": "user", "content": "Go on."}], "timeout": 0.001}
        text = ""
        async for chunk in await litellm.acompletion(MODEL, stream=True, **options):
            text += chunk.choices[0].delta.content or ""
        assert text == "word " * 400


async def test_leaving_a_stream_ends_its_request(until: Until) -> None:
    async with Engine(ScriptedModel(["word " * 400])) as engine:
        provide(engine)
        chat = [{"role": "user", "content": "Go on."}]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: litellm.acompletion(MODEL, chat))
            await until(lambda: engine.stats().running)
            tasks.cancel_scope.cancel()
        await until(lambda: not engine.stats().running)
