"""Guidance over HTTP and in chats: a negative prompt of messages is rendered as the prompt is."""

from __future__ import annotations

from typing import Any

import pytest
from server.chat_model import CHAT, ChatModel, ask

from asyncinfer import Engine, InvalidRequest, SamplingParams
from asyncinfer.server import create_app
from asyncinfer.testing import FakeModel

pytestmark = pytest.mark.asyncio

AWAY = [{"role": "system", "content": "Be rude."}, {"role": "user", "content": "hi"}]
GUIDED: dict[str, Any] = {"guidance_scale": 2.0, "temperature": 0.0, "max_tokens": 12}


async def test_messages_are_rendered_as_those_of_the_prompt() -> None:
    async with Engine(ChatModel()) as engine:
        ids = engine.tokenizer.encode_chat(AWAY)
        plain = await engine.generate(CHAT, temperature=0.0, max_tokens=12)
        for prompt in (CHAT, "hello"):
            want = await engine.generate(prompt, negative_prompt=ids, **GUIDED)
            done = await engine.generate(prompt, negative_prompt=AWAY, **GUIDED)
            assert done.token_ids == want.token_ids != plain.token_ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/messages", {"messages": CHAT}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
@pytest.mark.parametrize("negative", [AWAY, "not this", [5, 6]])
async def test_every_protocol_takes_it(path: str, body: dict[str, Any], negative: Any) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = {**body, "temperature": 0, limit: 12, "guidance_scale": 2, "negative_prompt": negative}
    async with Engine(ChatModel()) as engine:
        answer = await ask(create_app(engine), path, asked)
        assert answer.status == 200
        (given,) = body.values()
        prompt = [{"role": "user", "content": given}] if "input" in body else given
        want = await engine.generate(prompt, negative_prompt=negative, **GUIDED)
        assert text_of(answer.json) == want.text


def text_of(body: Any) -> str:
    if "choices" in body:
        choice = body["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    parts = body["content"] if "content" in body else body["output"][0]["content"]
    return str(parts[0]["text"])


@pytest.mark.parametrize(
    ("negative", "field"),
    [
        ([{"role": "user"}], "negative_prompt[0]"),
        ([{"role": "user", "content": ["x"]}], "negative_prompt[0]"),
        ([*AWAY, {"role": "user", "content": "x", "name": "y"}], "negative_prompt[2]"),
        ([*AWAY, 7], "negative_prompt[2]"),
    ],
)
async def test_what_is_no_message_is_named(negative: Any, field: str) -> None:
    async with Engine(ChatModel()) as engine:
        body = {"messages": CHAT, "guidance_scale": 2, "negative_prompt": negative}
        answer = await ask(create_app(engine), "/v1/chat/completions", body)
        assert answer.status == 400
        assert answer.json["error"]["param"] == field


async def test_a_model_without_a_template_says_so() -> None:
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match=r"negative_prompt=.*no chat template"):
            await engine.generate("x", negative_prompt=AWAY, **GUIDED)
        with pytest.raises(InvalidRequest, match="negative_prompt"):
            await engine.generate("x", negative_prompt=[{"role": "user", "content": ""}], **GUIDED)


async def test_parameters_stay_frozen() -> None:
    one, other = (SamplingParams(negative_prompt=AWAY, guidance_scale=2.0) for _ in range(2))  # type: ignore[arg-type]
    assert one == other
    assert hash(one) == hash(other)
