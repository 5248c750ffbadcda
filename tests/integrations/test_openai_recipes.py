"""Frameworks that take OpenAI's client, on an engine in this process: an agent with each."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from integrations.scripts import ANSWER, QUESTION, agent, temperature
from pydantic import BaseModel
from support import Until

from asyncinfer import Engine, openai_client
from asyncinfer.testing import Said, ScriptedModel

pytestmark = pytest.mark.anyio


class Forecast(BaseModel):
    city: str
    warm: bool


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pydantic_ai_agent(client: Any, **options: Any) -> Any:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(openai_client=client)
    model = models.OpenAIChatModel("ScriptedModel", provider=provider)
    return pydantic_ai.Agent(model, tools=[temperature], **options)


async def test_pydantic_ai() -> None:
    async with Engine(ScriptedModel(agent)) as engine, openai_client(engine) as client:
        made = pydantic_ai_agent(client)
        done = await made.run(QUESTION)
        assert done.output == ANSWER
        assert done.usage.cache_read_tokens > 0
        async with made.run_stream(QUESTION) as stream:
            texts = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(texts) == ANSWER
        assert len(texts) > 1


async def test_pydantic_ai_typed_answers() -> None:
    script = [
        Said(tool_calls=[("temperature", {"city": "Rome"})]),
        Said(tool_calls=[("final_result", {"city": "Rome", "warm": True})]),
    ]
    async with Engine(ScriptedModel(script)) as engine, openai_client(engine) as client:
        done = await pydantic_ai_agent(client, output_type=Forecast).run(QUESTION)
        assert done.output == Forecast(city="Rome", warm=True)


async def test_pydantic_ai_cancels(until: Until) -> None:
    async with Engine(ScriptedModel(["word " * 400])) as engine, openai_client(engine) as client:
        made = pydantic_ai_agent(client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run, QUESTION)
            await until(lambda: engine.stats().running)
            tasks.cancel_scope.cancel()
        await until(lambda: not engine.stats().running)
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_openai_agents(kind: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    async with Engine(ScriptedModel(agent)) as engine, openai_client(engine) as client:
        model = getattr(agents, kind)("ScriptedModel", client)
        tools = [agents.function_tool(temperature)]
        made = agents.Agent(name="weather", model=model, tools=tools)
        assert (await agents.Runner.run(made, QUESTION)).final_output == ANSWER
        stream = agents.Runner.run_streamed(made, QUESTION)
        events = [event.type async for event in stream.stream_events()]
        assert stream.final_output == ANSWER
        assert "raw_response_event" in events


# What these packages import warns of what is theirs to change.
THEIRS = pytest.mark.filterwarnings("ignore")


@THEIRS
async def test_llama_index() -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    workflow = pytest.importorskip("llama_index.core.agent.workflow")
    async with Engine(ScriptedModel(agent)) as engine, openai_client(engine) as client:
        model = like.OpenAILike(
            model="ScriptedModel",
            async_openai_client=client,
            api_key="in-process",
            context_window=engine.model.max_context,
            is_chat_model=True,
            is_function_calling_model=True,
        )
        made = workflow.FunctionAgent(tools=[temperature], llm=model)
        assert str(await made.run(QUESTION)) == ANSWER


@THEIRS
async def test_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else it asks another host for its list of prices.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    tool = {
        "name": "temperature",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    async with Engine(ScriptedModel(agent)) as engine, openai_client(engine) as client:
        chat: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            done = await litellm.acompletion(
                "openai/ScriptedModel",
                chat,
                client=client,
                tools=[{"type": "function", "function": tool}],
            )
            message = done.choices[0].message
            chat.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = temperature(**json.loads(call.function.arguments))
                chat.append({"role": "tool", "tool_call_id": call.id, "content": result})
        assert message.content == ANSWER
