"""Events of what is there already are one message."""

from __future__ import annotations

from typing import Any

import pytest
from server.chat_model import CHAT, EVERY_LOOP, Answer, ChatModel, ask
from support import Until

from asyncinfer import Engine
from asyncinfer.engine import Stream
from asyncinfer.server import create_app
from asyncinfer.server.call import MOST_HELD
from asyncinfer.testing import StepGate

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "n": 2},
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {"messages": CHAT[1:]},
    "/v1/responses": {"input": "hello"},
}
TOKENS = 12


class Slow(Answer):
    """A client that takes the first events, and the next ones once the engine has ended."""

    def __init__(self, engine: Engine, gate: StepGate, until: Until) -> None:
        super().__init__()
        self._engine = engine
        self._gate = gate
        self._until = until

    async def take(self, message: dict[str, Any]) -> None:
        await super().take(message)
        if len(self.messages) == 2:
            self._gate.open()
            await self._until(lambda: not self._engine.stats().running)


def said(answer: Answer) -> str:
    """The text of the first choice, as its events have it."""
    found = ""
    for event in filter(None, answer.events):
        for choice in event.get("choices", ()):
            if choice["index"] == 0:
                found += choice.get("text", "") + choice.get("delta", {}).get("content", "")
        delta = event.get("delta", "")
        found += delta if isinstance(delta, str) else delta.get("text", "")
    return found


@pytest.mark.anyio
@EVERY_LOOP
@pytest.mark.parametrize("path", BODIES)
async def test_what_came_while_a_client_took_its_time(path: str, until: Until) -> None:
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**BODIES[path], most: TOKENS, "ignore_eos": True, "stream": True}
    body["temperature"] = 0
    gate = StepGate()
    async with Engine(ChatModel(strict=False, gate=gate)) as engine:
        app = create_app(engine)
        gate.close()
        gate.let(4)
        told = await ask(app, path, body, answer=Slow(engine, gate, until))
        # Its head, the first events, and all others; a loop may hear of the end after the tokens.
        assert len(told.messages) in (3, 4)
        whole = await ask(app, path, body)
    assert told.whole
    assert len(said(told)) >= TOKENS // 2
    assert said(told) == said(whole)


@pytest.mark.anyio
@EVERY_LOOP
@pytest.mark.parametrize("path", BODIES)
async def test_an_engine_that_is_always_ahead(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client hears of it all the same, and can slow it down."""
    monkeypatch.setattr(Stream, "ready", True)
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**BODIES[path], most: 5 * MOST_HELD, "ignore_eos": True, "stream": True}
    async with Engine(ChatModel(strict=False)) as engine:
        told = await ask(create_app(engine), path, body)
    counts = [message["body"].count(b"data: ") for message in told.messages[1:]]
    assert sum(counts) == len(told.events)
    # A chunk may have some events, and so may the end.
    assert max(counts) <= MOST_HELD + 8


@pytest.mark.anyio
@EVERY_LOOP
async def test_events_come_before_the_error_that_follows(
    monkeypatch: pytest.MonkeyPatch, anyio_backend: Any
) -> None:
    read = Stream.__anext__
    left = 4

    async def failing(self: Stream) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("no more")
        return await read(self)

    monkeypatch.setattr(Stream, "__anext__", failing)
    monkeypatch.setattr(Stream, "ready", True)
    async with Engine(ChatModel(strict=False)) as engine:
        app, answer = create_app(engine), Answer()
        body = {"messages": CHAT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        with pytest.raises(OSError, match="no more"):
            await ask(app, "/v1/chat/completions", body, answer=answer)
    *said, error = answer.events
    assert answer.status == 200
    assert len(said) >= 3
    assert all("choices" in each for each in said)
    assert "error" in error
