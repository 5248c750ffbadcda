"""Frameworks that take OpenAI's client, on an engine in this process: an agent with each."""

from __future__ import annotations

import json
from typing import Any

import pytest
from integrations.scripts import ANSWER, QUESTION, agent, temperature
from pydantic import BaseModel

from asyncinfer import Engine, openai_client
from asyncinfer.testing import Said, ScriptedModel

pytestmark = pytest.mark.anyio


class Weather(BaseModel):
    celsius: int


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_an_openai_agent_with_tools_and_an_output_type(kind: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    script = [Said(tool_calls=[("temperature", {"city": "Rome"})]), '{"celsius": 21}']
    async with Engine(ScriptedModel(script)) as engine, openai_client(engine) as client:
        model = getattr(agents, kind)("ScriptedModel", client)
        tools = [agents.function_tool(temperature)]
        made = agents.Agent(name="weather", model=model, tools=tools, output_type=Weather)
        assert (await agents.Runner.run(made, QUESTION)).final_output == Weather(celsius=21)


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
