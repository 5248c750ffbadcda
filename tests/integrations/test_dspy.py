"""DSPy on an engine in this process: an agent, typed answers, streams, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anyio
import pytest
from integrations.scripts import ANSWER, QUESTION, temperature
from support import Until

pytest.importorskip("dspy", exc_type=ImportError)

import dspy
from dspy import lm15
from dspy.utils import exceptions as errors

from asyncinfer import Engine, SyncEngine
from asyncinfer.integrations.dspy import AsyncDSPyEngine, dspy_lm
from asyncinfer.testing import Said, ScriptedModel

# What it imports warns of what is its own to change.
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def native() -> Iterator[Any]:
    """Calls of tools in the model's own format."""
    adapter = dspy.ChatAdapter(use_native_function_calling=True, use_json_adapter_fallback=False)
    with dspy.context(adapter=adapter):
        yield adapter


def react(messages: list[dict[str, str]]) -> Said:
    """Calls the tool, and submits what it says. Fails where something was lost."""
    assert any(QUESTION in each["content"] for each in messages)
    results = [each["content"] for each in messages if each["role"] == "tool"]
    if not results:
        assert any('"temperature"' in each["content"] for each in messages), "no tool was offered"
        return Said(reasoning="I need it.", tool_calls=[("temperature", {"city": "Rome"})])
    assert results == ["21 degrees in Rome"]
    (called,) = [each["content"] for each in messages if each["role"] == "assistant"]
    assert '{"name": "temperature", "arguments": {"city": "Rome"}}' in called
    return Said(tool_calls=[("submit", {"answer": ANSWER})])


async def test_an_agent_runs_its_tools_to_the_end(native: Any) -> None:
    async with Engine(ScriptedModel(react)) as engine:
        agent = dspy.ReActV2("question -> answer", tools=[temperature])
        with dspy.context(lm=dspy_lm(engine, cache=False, num_retries=0)):
            done = await agent.acall(question=QUESTION)
    assert done.answer == ANSWER
    assert done.termination_reason == "submit"


def test_an_agent_of_a_program_without_an_event_loop(native: Any) -> None:
    with SyncEngine(ScriptedModel(react)) as engine:
        agent = dspy.ReActV2("question -> answer", tools=[temperature])
        with dspy.context(lm=dspy_lm(engine, cache=False)):
            assert agent(question=QUESTION).answer == ANSWER


class Verdict(dspy.Signature):  # type: ignore[misc]
    """Judge."""

    text: str = dspy.InputField()
    mood: Literal["good", "bad"] = dspy.OutputField()
    score: float = dspy.OutputField()


async def test_answers_are_held_to_their_schema() -> None:
    """`JSONAdapter` asks for a schema, and a script that leaves it fails."""
    answers = ['{"mood": "good", "score": 0.5}', '{"mood": "fine", "score": 0.5}']
    async with Engine(ScriptedModel(answers)) as engine:
        lm = dspy_lm(engine, cache=False, num_retries=0, max_tokens=200)
        with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
            done = await dspy.Predict(Verdict).acall(text="nice")
            assert (done.mood, done.score) == ("good", 0.5)
            with pytest.raises(Exception, match="does not fit"):
                await dspy.Predict(Verdict).acall(text="nice")


async def test_a_stream_and_the_whole_are_one_answer() -> None:
    said = Said("Rome.", reasoning="Italy...", tool_calls=[("temperature", {"city": "Rome"})] * 2)
    tool = lm15.FunctionTool(
        "temperature", parameters={"type": "object", "properties": {"city": {"type": "string"}}}
    )
    async with Engine(ScriptedModel([said, said])) as engine:
        request = lm15.Request(
            model="ScriptedModel", messages=(lm15.Message.user(QUESTION),), tools=(tool,)
        )
        dspys = AsyncDSPyEngine(engine)
        whole = await dspys.complete(request)
        first, *deltas, last = [event async for event in dspys.stream(request)]
    assert (first.type, last.type) == ("start", "end")
    parts: list[list[str]] = []
    for event in deltas:
        kind = event.delta.type
        if event.delta.part_index == len(parts):
            parts.append([kind, ""])
        assert (parts[-1][0], event.delta.part_index) == (kind, len(parts) - 1)
        parts[-1][1] += event.delta.input if kind == "tool_call" else event.delta.text
    told = [
        [part.type, json.dumps(part.input) if part.type == "tool_call" else part.text]
        for part in whole.message.parts
    ]
    assert parts == told
    assert [kind for kind, _ in told] == ["thinking", "text", "tool_call", "tool_call"]
    assert last.finish_reason == whole.finish_reason == "tool_call"
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.cache_read_tokens > 0


async def test_options_reach_the_engine() -> None:
    async with Engine(ScriptedModel(["Rome and more"] * 4)) as engine:
        lm = dspy_lm(engine, cache=False, max_tokens=4)
        assert await lm.acall("Which city?") == ["Rome"]
        (done,) = await lm.acall("Which city?", stop=["m"], max_tokens=9, logprobs=True)
        assert done["text"] == "Ro"
        assert len(done["logprobs"]["content"]) >= 2
        with pytest.raises(Exception, match="temprature"):
            await lm.acall("Which city?", temprature=1)
        cut = dspy_lm(engine, options={"stop": ["an"], "min_p": 0.1}, cache=False)
        assert await cut.acall("Which city?") == ["Rome "]


async def test_errors_are_those_of_dspy() -> None:
    async with Engine(ScriptedModel(["x " * 200]), max_requests=1, max_context=512) as engine:
        lm = dspy_lm(engine, cache=False, num_retries=0)
        with pytest.raises(errors.ContextWindowExceededError, match="context"):
            await lm.acall("word " * 600)
        with pytest.raises(errors.LMInvalidRequestError, match="min_p=-1"):
            await dspy_lm(engine, options={"min_p": -1}, cache=False).acall("x")
        async with engine.stream("hold", max_tokens=400):
            with pytest.raises(errors.LMRateLimitError):
                await lm.acall("x")
        with pytest.raises(Exception, match="take a SyncEngine"):
            lm("x")


async def test_a_copied_program_asks_the_same_engine(caplog: pytest.LogCaptureFixture) -> None:
    async with Engine(ScriptedModel(["fine"])) as engine:
        program = dspy.Predict("question -> answer")
        program.lm = dspy_lm(engine, cache=False, temperature=0.5)
        copied = program.deepcopy()
        assert copied.lm is not program.lm
        assert not caplog.records
        assert await copied.lm.acall("x") == ["fine"]


async def test_a_cancelled_call_ends_its_request(until: Until) -> None:
    async with Engine(ScriptedModel(["word " * 400])) as engine:
        lm = dspy_lm(engine, cache=False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lm.acall, "Go on.")
            await until(lambda: engine.stats().running)
            tasks.cancel_scope.cancel()
        await until(lambda: not engine.stats().running)
