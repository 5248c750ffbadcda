"""An agent of each framework on a model that was trained: it calls its tool, and comes to an end.

`smollm2` is too small to choose well, so each agent is told that a call is required.
"""

# Without `from __future__ import annotations`: LlamaIndex reads those of a tool as they are.
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from integrations.scripts import QUESTION
from pydantic import BaseModel

from asyncinfer import SyncEngine, openai_client
from asyncinfer.models import NAMED_MODELS, pulled

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        pulled(NAMED_MODELS["smollm2"]) is None, reason="needs the model: asyncinfer pull smollm2"
    ),
]
CALLED: list[str] = []


def temperature(city: Literal["Rome", "Oslo"]) -> str:
    """The temperature in a city."""
    CALLED.append(city)
    return f"21 degrees in {city}"


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]


def seen() -> str:
    """What the one call gave."""
    (city,) = CALLED
    return f"21 degrees in {city}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def opened() -> Iterator[SyncEngine]:
    with SyncEngine("smollm2", max_context=1024) as engine:
        yield engine


@pytest.fixture
def engine(opened: SyncEngine) -> SyncEngine:
    CALLED.clear()
    return opened


async def test_pydantic_ai(engine: SyncEngine) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from asyncinfer.integrations import pydantic_ai_model

    model = pydantic_ai_model(engine.engine, max_tokens=120)
    # The function's result is the answer.
    made = pydantic_ai.Agent(model, output_type=temperature)
    assert (await made.run(QUESTION)).output == seen()


async def test_langchain(engine: SyncEngine) -> None:
    pytest.importorskip("langchain_core")
    from langchain_core.messages import HumanMessage, ToolMessage

    from asyncinfer.integrations import ChatAsyncInfer

    model = ChatAsyncInfer(engine=engine, max_tokens=120, temperature=0)
    chat: list[Any] = [HumanMessage(QUESTION)]
    call = model.bind_tools([temperature], tool_choice="required", parallel_tool_calls=False)
    chat.append(await call.ainvoke(chat))
    (told,) = chat[-1].tool_calls
    chat.append(ToolMessage(temperature(told["args"]["city"]), tool_call_id=told["id"]))
    assert (await model.ainvoke(chat)).text
    assert chat[-1].content == seen()


async def test_openai_agents(engine: SyncEngine) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    async with openai_client(engine.engine) as client:
        made = agents.Agent(
            name="weather",
            model=agents.OpenAIResponsesModel(engine.model.name, client),
            model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False),
            tools=[agents.function_tool(temperature)],
            tool_use_behavior="stop_on_first_tool",
        )
        assert (await agents.Runner.run(made, QUESTION)).final_output == seen()


async def test_llama_index(engine: SyncEngine) -> None:
    pytest.importorskip("llama_index.core", exc_type=ImportError)
    from llama_index.core.tools import FunctionTool

    from asyncinfer.integrations import LlamaIndexLLM

    llm = LlamaIndexLLM(engine=engine, options={"max_tokens": 120})
    tool = FunctionTool.from_defaults(temperature)
    done = await llm.apredict_and_call([tool], QUESTION, tool_required=True)
    assert str(done) == seen()


async def test_dspy(engine: SyncEngine) -> None:
    pytest.importorskip("dspy", exc_type=ImportError)
    import dspy

    from asyncinfer.integrations import dspy_lm

    class Where(dspy.Signature):  # type: ignore[misc]
        """Which place is asked about?"""

        question: str = dspy.InputField()
        place: Place = dspy.OutputField()

    lm = dspy_lm(engine, cache=False, max_tokens=120, num_retries=0)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = await dspy.Predict(Where).acall(question=QUESTION)
    assert temperature(found.place.city) == seen()


async def test_litellm(engine: SyncEngine) -> None:
    pytest.importorskip("mcp")
    litellm = pytest.importorskip("litellm", exc_type=ImportError)
    from asyncinfer.integrations import LiteLLMProvider

    handler = LiteLLMProvider(engine, max_tokens=120)
    litellm.custom_provider_map = [{"provider": "asyncinfer", "custom_handler": handler}]
    name = f"asyncinfer/{engine.model.name}"
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "temperature", "parameters": parameters}}
    chat: list[Any] = [{"role": "user", "content": QUESTION}]
    done = await litellm.acompletion(
        name, chat, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    chat.append(done.choices[0].message.model_dump(exclude_none=True))
    (call,) = done.choices[0].message.tool_calls
    result = temperature(**json.loads(call.function.arguments))
    chat.append({"role": "tool", "tool_call_id": call.id, "content": result})
    done = await litellm.acompletion(name, chat)
    assert done.choices[0].message.content
    assert result == seen()
