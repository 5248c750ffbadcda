"""LlamaIndex on an engine in this process: an agent, typed answers, streams, errors."""

from __future__ import annotations

import anyio
import pytest
from integrations.scripts import ANSWER, QUESTION, agent, temperature
from pydantic import BaseModel
from support import Until

pytest.importorskip("llama_index.core", exc_type=ImportError)

from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool

from asyncinfer import Engine, InvalidRequest, SyncEngine
from asyncinfer.integrations.llama_index import LlamaIndexLLM
from asyncinfer.testing import Said, ScriptedModel

# What it imports warns of what is its own to change.
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore")]


class City(BaseModel):
    name: str
    people: int


TOOL = FunctionTool.from_defaults(City, name="City")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_agent_runs_its_tools_to_the_end(streaming: bool) -> None:
    async with Engine(ScriptedModel(agent)) as engine:
        made = FunctionAgent(
            tools=[temperature], llm=LlamaIndexLLM(engine=engine), streaming=streaming
        )
        running = made.run(QUESTION)
        events = [each async for each in running.stream_events() if isinstance(each, AgentStream)]
        assert str(await running) == ANSWER
        if streaming:
            assert "".join(each.delta for each in events) == ANSWER
            thought = "".join(each.thinking_delta or "" for each in events)
            assert thought == "I need the weather."


async def test_typed_answers() -> None:
    said = Said(tool_calls=[("City", {"name": "Rome", "people": 2_800_000})])
    async with Engine(ScriptedModel([said])) as engine:
        prompt = PromptTemplate("Which {what}?")
        llm = LlamaIndexLLM(engine=engine)
        city = await llm.astructured_predict(City, prompt, what="city")
        assert city == City(name="Rome", people=2_800_000)


async def test_typed_answers_grow_in_a_stream() -> None:
    prompt = PromptTemplate("Which {what}?")
    said = Said(tool_calls=[("City", {"name": "Rome", "people": 2_800_000})])
    async with Engine(ScriptedModel([said] * 2)) as engine:
        llm = LlamaIndexLLM(engine=engine)
        stream = await llm.astream_structured_predict(City, prompt, what="city")
        seen = [each async for each in stream]
        assert seen[-1] == City(name="Rome", people=2_800_000)
        assert [getattr(each, "name", None) for each in seen].index("Rome") < len(seen) - 5
        # What the end of an answer cut short is no call with a part of its arguments.
        cut = [each async for each in await llm.astream_chat_with_tools([TOOL], "x", max_tokens=55)]
        calls = [llm.get_tool_calls_from_response(each, False) for each in cut]
        assert {"name": "Rome"} in [call.tool_kwargs for (call,) in filter(None, calls)]
        assert [call.tool_kwargs for call in calls[-1]] == [{}]


async def test_calls_as_older_versions_keep_them_are_told() -> None:
    def told(messages: list[dict[str, str]]) -> str:
        assert '"arguments": {"city": "Rome"}' in messages[1]["content"]
        return "fine"

    function = {"name": "temperature", "arguments": '{"city": "Rome"}'}
    called = [{"id": "call_1", "type": "function", "function": function}]
    chat = [
        ChatMessage(QUESTION),
        ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": called}),
        ChatMessage(role="tool", content="21", additional_kwargs={"tool_call_id": "call_1"}),
    ]
    async with Engine(ScriptedModel(told)) as engine:
        assert (await LlamaIndexLLM(engine=engine).achat(chat)).message.content == "fine"


async def test_a_stream_and_the_whole_are_one_answer() -> None:
    said = Said("Rome.", reasoning="Italy...", tool_calls=[("temperature", {"city": "Rome"})] * 2)
    tool = {"name": "temperature", "parameters": {"type": "object", "properties": {}}}
    async with Engine(ScriptedModel([said, said])) as engine:
        llm = LlamaIndexLLM(engine=engine, options={"max_tokens": 400})
        asked = [ChatMessage(QUESTION)]
        whole = await llm.achat(asked, tools=[tool])
        last = [each async for each in await llm.astream_chat(asked, tools=[tool])][-1]
        for one, other in zip(last.message.blocks, whole.message.blocks, strict=True):
            # Ids of calls are made anew.
            assert one.model_dump(exclude={"tool_call_id"}) == other.model_dump(
                exclude={"tool_call_id"}
            )
        kinds = [block.block_type for block in whole.message.blocks]
        assert kinds == ["thinking", "text", "tool_call", "tool_call"]
        calls = llm.get_tool_calls_from_response(whole)
        assert [call.tool_kwargs for call in calls] == [{"city": "Rome"}] * 2
        assert whole.additional_kwargs["completion_tokens"] > 0


async def test_a_program_without_an_event_loop() -> None:
    def work() -> None:
        with SyncEngine(ScriptedModel(["Rome."] * 4)) as engine:
            llm = LlamaIndexLLM(engine=engine)
            assert llm.complete("Which city?").text == "Rome."
            assert str(llm.chat([ChatMessage("Which city?")])) == "assistant: Rome."
            assert [*llm.stream_complete("Which city?")][-1].text == "Rome."
            *_, last = llm.stream_chat([ChatMessage("Which city?")])
            assert last.message.content == "Rome."
            assert llm.metadata.context_window == engine.model.max_context

    await anyio.to_thread.run_sync(work)


async def test_bad_input_is_named() -> None:
    async with Engine(ScriptedModel(["Rome."])) as engine:
        llm = LlamaIndexLLM(engine=engine)
        with pytest.raises(InvalidRequest, match=r"messages\[0\]\.blocks\[0\]='image'"):
            await llm.achat([ChatMessage([ImageBlock(url="http://a.example/b.png")])])
        with pytest.raises(InvalidRequest, match="temprature=1"):
            await llm.achat([ChatMessage("x")], temprature=1)
        with pytest.raises(InvalidRequest, match="n=2: must be 1 in a stream"):
            await llm.astream_chat([ChatMessage("x")], n=2)
        with pytest.raises(TypeError, match="take a SyncEngine"):
            llm.chat([ChatMessage("x")])
        with pytest.raises(ValueError, match="calls no tool"):
            llm.get_tool_calls_from_response(await llm.achat([ChatMessage("x")]))
        with pytest.raises(ValueError, match="temprature"):
            LlamaIndexLLM(engine=engine, temprature=1)


async def test_leaving_cancels(until: Until) -> None:
    async with Engine(ScriptedModel(["word " * 400] * 2)) as engine:
        llm = LlamaIndexLLM(engine=engine)
        stream = await llm.astream_chat([ChatMessage("Go on.")])
        await anext(stream)
        await stream.aclose()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(llm.acomplete, "Go on.")
            await until(lambda: engine.stats().running)
            tasks.cancel_scope.cancel()
        await until(lambda: not engine.stats().running)
