"""`pydantic_ai_model`: pydantic-ai's agents on an engine in this process."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from integrations.scripts import ANSWER, QUESTION, agent, temperature
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelResponse, ThinkingPart
from pydantic_ai.models.openai import OpenAIResponsesModel
from support import Until

from asyncinfer import Engine
from asyncinfer.integrations import pydantic_ai_model
from asyncinfer.integrations.pydantic_ai import AsyncInferProvider
from asyncinfer.testing import Said, ScriptedModel

pytestmark = pytest.mark.anyio


class Forecast(BaseModel):
    city: str
    warm: bool


ROME = Forecast(city="Rome", warm=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_an_agent_calls_its_tool() -> None:
    async with Engine(ScriptedModel(agent)) as engine:
        made = Agent(pydantic_ai_model(engine), tools=[temperature])
        done = await made.run(QUESTION)
        assert done.output == ANSWER
        assert done.usage.cache_read_tokens > 0
        said = [each for each in done.all_messages() if isinstance(each, ModelResponse)]
        thought = [part for part in said[0].parts if isinstance(part, ThinkingPart)]
        assert [part.content for part in thought] == ["I need the weather."]
        assert {each.provider_name for each in said} == {"asyncinfer"}
        async with made.run_stream(QUESTION) as stream:
            texts = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(texts) == ANSWER
        assert len(texts) > 1


async def test_an_agent_on_responses() -> None:
    async with Engine(ScriptedModel(agent)) as engine:
        provider = AsyncInferProvider(engine)
        model = OpenAIResponsesModel(engine.model.name, provider=provider)
        assert (await Agent(model, tools=[temperature]).run(QUESTION)).output == ANSWER


async def test_typed_answers() -> None:
    script = [
        Said(tool_calls=[("temperature", {"city": "Rome"})]),
        Said(tool_calls=[("final_result", ROME.model_dump())]),
    ]
    async with Engine(ScriptedModel(script)) as engine:
        made = Agent(pydantic_ai_model(engine), tools=[temperature], output_type=Forecast)
        assert (await made.run(QUESTION)).output == ROME


async def test_native_output_fits_its_schema() -> None:
    async with Engine(ScriptedModel([ROME.model_dump_json()])) as engine:
        made = Agent(pydantic_ai_model(engine), output_type=NativeOutput(Forecast))
        assert (await made.run(QUESTION)).output == ROME
        # What it says is drawn from what the schema allows.
        assert engine.stats().masks > 0


async def test_native_output_of_an_agent_with_tools() -> None:
    script = [Said(tool_calls=[("temperature", {"city": "Rome"})]), ROME.model_dump_json()]
    async with Engine(ScriptedModel(script)) as engine:
        made = Agent(
            pydantic_ai_model(engine), tools=[temperature], output_type=NativeOutput(Forecast)
        )
        assert (await made.run(QUESTION)).output == ROME


async def test_settings_and_scope_reach_the_engine() -> None:
    async with Engine(ScriptedModel(["one two three four five six seven"] * 3)) as engine:
        short = pydantic_ai_model(engine, cache_scope="alice", max_tokens=4)
        first = await Agent(short).run(QUESTION)
        assert first.usage.output_tokens == 4
        again = await Agent(short).run(QUESTION)
        assert again.usage.cache_read_tokens > 0
        other = await Agent(pydantic_ai_model(engine, cache_scope="bob")).run(QUESTION)
        assert other.usage.cache_read_tokens == 0


async def test_system_prompts_become_one() -> None:
    seen: list[list[str]] = []

    def script(messages: list[dict[str, str]]) -> str:
        seen.append([each["content"] for each in messages if each["role"] == "system"])
        return "Yes."

    async with Engine(ScriptedModel(script)) as engine:
        await Agent(pydantic_ai_model(engine), system_prompt=["Be brief.", "Be kind."]).run("Hi")
    assert seen == [["Be brief.\n\nBe kind."]]


async def test_images_are_refused() -> None:
    async with Engine(ScriptedModel(["Yes."])) as engine:
        picture = BinaryContent(b"\x89PNG", media_type="image/png")
        with pytest.raises(ModelHTTPError, match="images cannot be read"):
            await Agent(pydantic_ai_model(engine)).run(["What is this?", picture])


async def test_a_name_does_not_make_a_model_think() -> None:
    """pydantic-ai drops `temperature` for what OpenAI calls o3."""
    profile: Any = AsyncInferProvider.model_profile("o3-mini")
    assert not profile.get("openai_supports_reasoning")


async def test_a_cancelled_run_ends_its_request(until: Until) -> None:
    async with Engine(ScriptedModel(["word " * 400])) as engine:
        made = Agent(pydantic_ai_model(engine))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run, QUESTION)
            await until(lambda: engine.stats().running)
            tasks.cancel_scope.cancel()
        await until(lambda: not engine.stats().running)
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
