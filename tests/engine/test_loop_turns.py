"""A bad request keeps an event loop busy for less than 20 ms of processor time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from time import thread_time
from typing import Any

import pytest

from asyncinfer import Engine, InvalidRequest
from asyncinfer.testing import FakeModel
from asyncinfer.text import ChatTemplate

pytestmark = pytest.mark.anyio

MANY = 1_000_000
LIMIT = 0.02
MESSAGE: dict[str, Any] = {"role": "user", "content": "x"}
GUIDED = {"guidance_scale": 2.0}
#: A prompt, and options.
BAD: dict[str, tuple[Any, dict[str, Any]]] = {
    "ids": ([1] * MANY, {}),
    "no ids": ([[1]] * MANY, {}),
    "texts": (["x"] * MANY, {}),
    "messages": ([MESSAGE] * MANY, {}),
    "parts": ([MESSAGE | {"content": [{"type": "text", "text": "x"}] * MANY}], {}),
    "values": ([MESSAGE | {"x": [["x"] * MANY]}], {}),
    "negative messages": ("x", {"negative_prompt": [MESSAGE] * MANY, **GUIDED}),
    "template options": ([MESSAGE], {"template_options": {"a": ["x"] * MANY}}),
    "tools": ([MESSAGE], {"tools": [{}] * MANY}),
    "stop ids": ("x", {"stop_token_ids": range(MANY)}),
    "schema": ("x", {"json_schema": {"enum": ["x"] * MANY}}),
    "choices": ("x", {"choice": ["x"] * MANY}),
    "arguments": ("x", {"sampler": "mirostat", "sampler_args": {"tau": [1] * MANY}}),
    "prediction": ("x", {"prediction": [1] * MANY}),
    "bias": ("x", {"logit_bias": dict.fromkeys(range(MANY), 1.0)}),
}


@pytest.fixture
def nothing_collected() -> Iterator[None]:
    """The collector looks at the whole program's objects, a test's million among them."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request(name: str, nothing_collected: None) -> None:
    prompt, options = BAD[name]
    took = []
    async with Engine(FakeModel(template=ChatTemplate("{{ messages }}"))) as engine:
        for _ in range(3):
            began = thread_time()
            with pytest.raises(InvalidRequest):
                await engine.generate(prompt, max_tokens=1, **options)
            took.append(thread_time() - began)
    assert min(took) < LIMIT, took
