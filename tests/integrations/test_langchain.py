"""LangChain's standard tests on a scripted model, an agent, and what is the engine's own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest
from integrations.scripts import ANSWER, QUESTION, agent, temperature
from support import Until

pytest.importorskip("langchain_core")
pytest.importorskip("langchain_tests")

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from pydantic import BaseModel

from asyncinfer import Engine, InvalidRequest, PromptTooLong, RequestFailed, SyncEngine
from asyncinfer.integrations.langchain import ChatAsyncInfer
from asyncinfer.testing import FakeModel, Said, ScriptedModel
from asyncinfer.text import ChatTemplate

pytestmark = pytest.mark.anyio

JOKE = {"setup": "Why do cats sit on keyboards?", "punchline": "To write."}
#: What the standard tests ask, and what a model would say.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "magic_function(3)": ("magic_function", {"input": 3}),
    "magic_function_no_args()": ("magic_function_no_args", {}),
    "Pirate greeting": ("greeting_generator", {"answer_style": "Pirate"}),
    "Hello!": ("magic_function", {"input": 3}),
    "What is 3 + 4": ("my_adder_tool", {"a": 3, "b": 4}),
    "San Francisco": ("get_weather", {"location": "San Francisco, CA"}),
    "你好": ("unicode_customer", {"customer_name": "你好啊集团", "description": "技术公司"}),
    "こんにちは": ("unicode_customer", {"customer_name": "こんにちは", "description": "会社"}),
}


def standard(messages: list[dict[str, str]]) -> Said | str:
    asked = next(each["content"] for each in reversed(messages) if each["role"] == "user")
    if messages[-1]["role"] == "tool":
        return "That is what the tool says."
    if "joke" in asked:
        return json.dumps(JOKE)
    called = [call for text, call in CALLS.items() if text in asked]
    return Said(tool_calls=called) if called else "Hello, and welcome."


@pytest.fixture(scope="module")
def engine() -> Iterator[SyncEngine]:
    with SyncEngine(ScriptedModel(standard)) as opened:
        yield opened


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def benchmark() -> Callable[[Callable[[], object]], object]:
    """The standard tests measure with this; here it runs once."""
    return lambda work: work()


@pytest.fixture
def vcr() -> None:
    """The standard tests record requests by HTTP with this, where there are any."""


class Ours:
    """What both suites are told of the model."""

    @pytest.fixture(autouse=True)
    def _engine(self, engine: SyncEngine) -> None:
        self.engine = engine

    @property
    def chat_model_class(self) -> type[ChatAsyncInfer]:
        return ChatAsyncInfer

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        # Without `api_key`: there is no service.
        return {"temperature": 0, "max_tokens": 400, "timeout": 60, "stop": [], "max_retries": 2}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False


class TestStandardUnits(Ours, ChatModelUnitTests):
    pass


class TestStandardIntegration(Ours, ChatModelIntegrationTests):
    pass


async def merged(chunks: AsyncIterator[AIMessageChunk]) -> AIMessageChunk:
    full: AIMessageChunk | None = None
    async for chunk in chunks:
        full = chunk if full is None else full + chunk
    assert full is not None
    return full


class City(BaseModel):
    name: str
    people: int


async def test_an_agent_runs_its_tools_to_the_end() -> None:
    async with Engine(ScriptedModel(agent)) as engine:
        model = ChatAsyncInfer(engine=engine).bind_tools([temperature])
        chat: list[Any] = [HumanMessage(QUESTION)]
        while True:
            full = await merged(model.astream(chat))
            chat.append(full)
            if not full.tool_calls:
                break
            assert [block["type"] for block in full.content_blocks] == ["reasoning", "tool_call"]
            chat += [
                ToolMessage(temperature(**call["args"]), tool_call_id=call["id"])
                for call in full.tool_calls
            ]
        assert full.text == ANSWER
        assert full.usage_metadata is not None
        assert full.usage_metadata["input_token_details"]["cache_read"] > 0
        assert full.response_metadata == {"model_name": "ScriptedModel", "finish_reason": "stop"}


async def test_langchains_own_agent_runs_to_the_end() -> None:
    agents = pytest.importorskip("langchain.agents")
    async with Engine(ScriptedModel(agent)) as engine:
        made = agents.create_agent(ChatAsyncInfer(engine=engine), tools=[temperature])
        done = await made.ainvoke({"messages": [HumanMessage(QUESTION)]})
        assert done["messages"][-1].text == ANSWER


async def test_an_agents_typed_answer_fits_beside_its_tools() -> None:
    script = [Said(tool_calls=[("temperature", {"city": "Rome"})]), '{"name":"Rome","people":1}']
    form = {"name": "City", "strict": True, "schema": City.model_json_schema()}
    async with Engine(ScriptedModel([*script, "Rome"])) as engine:
        # As `create_agent(response_format=ProviderStrategy(City))` binds it.
        model = ChatAsyncInfer(engine=engine).bind_tools(
            [temperature], strict=True, response_format={"type": "json_schema", "json_schema": form}
        )
        assert (await model.ainvoke("How many?")).tool_calls[0]["args"] == {"city": "Rome"}
        assert City.model_validate_json((await merged(model.astream("x"))).text).people == 1
        with pytest.raises(RequestFailed, match="does not fit"):
            await model.ainvoke("How many?")


async def test_a_stream_and_the_whole_are_one_answer() -> None:
    said = Said("Rome.", reasoning="Italy...", tool_calls=[("temperature", {"city": "Rome"})])
    async with Engine(ScriptedModel([said, said])) as engine:
        model = ChatAsyncInfer(engine=engine, options={"cache_scope": "one"})
        tools = model.bind_tools([temperature])
        whole = await tools.ainvoke(QUESTION)
        full = await merged(tools.astream(QUESTION))
        assert full.text == whole.text == "Rome."
        assert full.additional_kwargs == whole.additional_kwargs
        assert full.response_metadata == whole.response_metadata
        assert [call["args"] for call in full.tool_calls] == [{"city": "Rome"}]
        assert [call["args"] for call in whole.tool_calls] == [{"city": "Rome"}]


@pytest.mark.parametrize("way", ["ainvoke", "astream", "streaming"])
async def test_a_call_that_was_cut_short_is_invalid_wherever_it_was_cut(way: str) -> None:
    """LangChain completes the arguments of a stream, and an agent would call the tool with them."""
    args: dict[str, Any] = {"city": 'Ro\\m"e', "days": [{"a": [1, {}]}, [2]], "b": {"c": {}}}
    said = Said(tool_calls=[("temperature", args)])
    cut = []
    async with Engine(ScriptedModel(lambda _: said)) as engine:
        model = ChatAsyncInfer(engine=engine, streaming=way == "streaming")
        tools = model.bind_tools([{"name": "temperature", "parameters": {"type": "object"}}])
        for most in range(16, 200):
            if way == "astream":
                done = await merged(tools.astream(QUESTION, max_tokens=most))
            else:
                done = await tools.ainvoke(QUESTION, max_tokens=most)
            assert all(call["args"] == args for call in done.tool_calls)
            for call in done.invalid_tool_calls:
                assert call["name"] == "temperature"
                cut.append(call["args"])
            if done.response_metadata["finish_reason"] == "stop":
                break
        assert done.tool_calls
        assert not done.invalid_tool_calls
    assert len(cut) >= len(json.dumps(args)) - 1


async def test_logprobs_are_where_langchain_has_them() -> None:
    async with Engine(ScriptedModel(["Rome."] * 4)) as engine:
        model = ChatAsyncInfer(engine=engine, options={"logprobs": 1})
        whole = await model.ainvoke(QUESTION)
        streamed = await merged(model.astream(QUESTION))
        for done in (whole, streamed):
            content = done.response_metadata["logprobs"]["content"]
            tokens = engine.tokenizer.encode("Rome.", add_special_tokens=False)
            assert len(content) == len(tokens) + 1
            assert "".join(each["token"] for each in content[:-1]) == "Rome."
            assert bytes(byte for each in content[:-1] for byte in each["bytes"]) == b"Rome."
            for each in content:
                assert each["logprob"] == each["top_logprobs"][0]["logprob"]
        without = await ChatAsyncInfer(engine=engine).ainvoke(QUESTION)
        assert "logprobs" not in without.response_metadata


async def test_typed_answers_and_their_raw_messages() -> None:
    answers = ['{"name": "Rome", "people": 2800000}'] * 2 + ['{"name": "Rome", "peop']
    async with Engine(ScriptedModel(answers)) as engine:
        model = ChatAsyncInfer(engine=engine)
        city = await model.with_structured_output(City).ainvoke("Which city?")
        assert city == City(name="Rome", people=2_800_000)
        raw = model.with_structured_output(City, include_raw=True, max_tokens=20)
        done = await raw.ainvoke("Which city?")
        assert done["parsed"] is None
        assert done["parsing_error"] is not None
        assert done["raw"].response_metadata["finish_reason"] == "length"
        with pytest.raises(InvalidRequest, match="method='magic'"):
            model.with_structured_output(City, method="magic")


async def test_tokens_are_counted_by_the_engine() -> None:
    chat = [
        SystemMessage("Be brief."),
        HumanMessage("one"),
        AIMessage("two"),
        HumanMessage("three"),
    ]
    async with Engine(ScriptedModel(["fine"])) as engine:
        model = ChatAsyncInfer(engine=engine)
        assert model.get_token_ids("one two") == engine.tokenizer.encode("one two")
        assert model.get_num_tokens("one two") == len(engine.tokenizer.encode("one two"))
        done = await model.ainvoke(chat)
        assert done.usage_metadata is not None
        count = model.get_num_tokens_from_messages(chat)
        assert count == done.usage_metadata["input_tokens"]
        assert model.get_num_tokens_from_messages(chat, [temperature]) > count
        assert model.get_num_tokens_from_messages([]) == 0
        # The system message is counted by itself, with the beginning of another answer.
        kept = trim_messages(chat, token_counter=model, max_tokens=count, include_system=True)
        assert kept == [chat[0], *chat[2:]]
        own = ChatAsyncInfer(engine=engine, custom_get_token_ids=lambda text: [*range(len(text))])
        assert own.get_num_tokens("one") == 3


async def test_a_part_of_a_chat_that_the_template_refuses_is_counted_by_its_texts() -> None:
    users = ChatTemplate(
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    async with Engine(FakeModel(template=users)) as engine:
        model = ChatAsyncInfer(engine=engine)
        assert model.get_num_tokens_from_messages([AIMessage("two"), HumanMessage("three")]) == 8
        with pytest.raises(InvalidRequest, match=r"tools\[0\].type='web_search'"):
            model.get_num_tokens_from_messages([HumanMessage("x")], [{"type": "web_search"}])


async def test_leaving_cancels(until: Until) -> None:
    async with Engine(ScriptedModel(["word " * 400] * 2)) as engine:
        model = ChatAsyncInfer(engine=engine)
        with anyio.CancelScope() as scope:
            # What has arrived is read to its end first, on a slow machine the whole answer.
            async for _ in model.astream("Go on."):
                scope.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(model.ainvoke, "Go on.")
            await until(lambda: engine.stats().running)
            tasks.cancel_scope.cancel()
        await until(lambda: not engine.stats().running)
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


async def test_bad_input_is_named() -> None:
    picture = HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])
    wrong: list[tuple[list[Any], dict[str, Any], str]] = [
        ([picture], {}, r"messages\[0\].content\[0\].type='image'"),
        ([AIMessage("x"), FunctionMessage("x", name="f")], {}, r"messages\[1\]='FunctionMessage'"),
        ([HumanMessage("x")], {"temprature": 1}, "temprature=1"),
        ([HumanMessage("x")], {"tool_choice": "none_such"}, "tool_choice='none_such'"),
        ([HumanMessage("x")], {"response_format": {"type": "xml"}}, "response_format="),
    ]
    async with Engine(ScriptedModel([])) as engine:
        model = ChatAsyncInfer(engine=engine)
        for messages, options, message in wrong:
            with pytest.raises(InvalidRequest, match=message):
                await model.ainvoke(messages, **options)
        for call in (model.ainvoke("x" * 40_000), anext(model.astream("x" * 40_000))):
            with pytest.raises(ContextOverflowError, match="fit the context") as long:
                await call
            assert isinstance(long.value, PromptTooLong)
        with pytest.raises(InvalidRequest, match="n=2: must be 1"):
            await anext(model.astream("x", n=2))
        with pytest.raises(TypeError, match="take a SyncEngine"):
            model.invoke("x")
        with pytest.raises(ValueError, match="temprature"):
            ChatAsyncInfer(engine=engine, temprature=1)
