"""An application whose engine closes: what was begun is answered to its end."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest
from server.chat_model import CHAT, Answer, ChatModel, ask
from support import Until, places

from asyncinfer import Engine
from asyncinfer.server import create_app
from asyncinfer.testing import StepGate

pytestmark = pytest.mark.anyio

CHAT_BODY = {"messages": CHAT, "max_tokens": 3, "logprobs": True}
COMPLETION_BODY = {"prompt": "hello", "max_tokens": 3, "logprobs": 1, "echo": True}
TOKENS_BODY = {"prompt": [104, 105], "max_tokens": 3, "echo": True}
RESPONSE_BODY = {"input": "hello", "max_output_tokens": 3, "top_logprobs": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT_BODY),
        ("/v1/chat/completions", {**CHAT_BODY, "stream": True}),
        ("/v1/completions", COMPLETION_BODY),
        ("/v1/completions", TOKENS_BODY),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "stream": True}),
        ("/v1/responses", RESPONSE_BODY),
        ("/v1/responses", {**RESPONSE_BODY, "stream": True}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 3}),
    ],
)
async def test_an_answer_that_was_begun_is_whole(
    path: str, body: dict[str, Any], until: Until
) -> None:
    """Its logprobs and its echo need the tokenizer once the engine closes."""
    gate, answer = StepGate(), Answer()
    async with Engine(ChatModel(gate=gate)) as engine:
        app = create_app(engine)
        gate.close()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(ask, app, path, body, answer=answer))
            await until(lambda: places(engine) == 1 and engine.stats().running == 1)
            tasks.start_soon(partial(engine.aclose, drain_timeout=120))
            await until(lambda: engine.health().state == "draining")
            assert (await ask(app, path, body)).status == 503
            gate.open()
    assert (answer.status, answer.whole) == (200, True)
    assert b'"error":{' not in answer.body
