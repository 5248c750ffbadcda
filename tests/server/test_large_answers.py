"""Answers of many numbers are made beside the event loop."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from server.chat_model import CHAT, ChatModel, ask

from asyncinfer import Engine
from asyncinfer.server import call as call_module
from asyncinfer.server import create_app
from asyncinfer.server.body import SMALL
from asyncinfer.testing import Said, ScriptedModel

pytestmark = pytest.mark.anyio

MANY: dict[str, Any] = {"ignore_eos": True, "seed": 1}
TOKENS = 600


def encoder(recorded: list[tuple[int, bool]]) -> Any:
    """`json_bytes`, which records how much it has made, and whether another thread has."""
    plain, here = call_module.json_bytes, threading.get_ident()

    def recording(*given: Any) -> bytes:
        made: bytes = plain(*given)
        recorded.append((len(made), threading.get_ident() != here))
        return made

    return recording


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_tokens": TOKENS, "logprobs": True, "top_logprobs": 8},
        ),
        ("/v1/completions", {"prompt": "x", "max_tokens": TOKENS, "logprobs": 8}),
        ("/v1/completions", {"prompt": "x" * TOKENS, "max_tokens": 1, "logprobs": 8, "echo": True}),
        ("/v1/responses", {"input": "x", "max_output_tokens": TOKENS, "top_logprobs": 8}),
        (
            "/v1/responses",
            {"input": "x", "max_output_tokens": TOKENS, "top_logprobs": 8, "stream": True},
        ),
    ],
    ids=["chat", "completion", "echo", "response", "events"],
)
async def test_many_logprobs(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[int, bool]] = []
    monkeypatch.setattr(call_module, "json_bytes", encoder(recorded))
    async with Engine(ChatModel()) as engine:
        answer = await ask(create_app(engine), path, {**body, **MANY})
    assert answer.status == 200
    large = [beside for size, beside in recorded if size > SMALL]
    assert large
    assert all(large)


async def test_many_logprobs_before_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that a call follows ends as one at the end of its response."""
    recorded: list[tuple[int, bool]] = []
    monkeypatch.setattr(call_module, "json_bytes", encoder(recorded))
    said = Said("x" * TOKENS, tool_calls=[("weather", {"city": "Rome"})])
    body = {"input": "x", "tools": [{"type": "function", "name": "weather"}], "stream": True}
    async with Engine(ScriptedModel([said])) as engine:
        answer = await ask(create_app(engine), "/v1/responses", {**body, "top_logprobs": 8})
    ends = [each for each in answer.events if each["type"] == "response.output_text.done"]
    assert len(ends[0]["logprobs"]) >= TOKENS
    large = [beside for size, beside in recorded if size > SMALL]
    assert len(large) == 4
    assert all(large)


@pytest.mark.parametrize("count", [0, 1, 63, 512, 513, 1000])
def test_json_in_pieces_is_the_same_json(count: int) -> None:
    deep = [{"token": "é\ud800", "bytes": [1, 2], "top": [{"x": None}] * 3}] * count
    value = {"a": [deep, {}, [], 1.5, True], "b": {"c": list(range(count))}, "d": "text"}
    whole = call_module.json_bytes(value)
    assert call_module.json_bytes(value, True) == whole
    assert json.loads(whole)["b"] == value["b"]
