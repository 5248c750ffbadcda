"""A fake model that chats, an application on it, and its two ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import pytest
import uvicorn

from asyncinfer import EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.testing import FakeModel
from asyncinfer.text import ChatTemplate

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
#: For tests whose subject is how the application waits.
EVERY_LOOP = pytest.mark.parametrize(
    "anyio_backend",
    [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True}), ("trio", {})],
    ids=["asyncio", "uvloop", "trio"],
)


class ChatModel(FakeModel):
    """With a chat template."""

    def __init__(self, *, template: str = TEMPLATE, **options: Any) -> None:
        super().__init__(**options)
        self.template = template

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        loaded = super().load(config, progress)
        template = ChatTemplate(self.template, shield=loaded.tokenizer.shield)
        return replace(loaded, template=template)


@asynccontextmanager
async def listening(app: Any, **options: Any) -> AsyncIterator[str]:
    """The application behind a socket of this machine; gives its URL."""
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", **options)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    try:
        with anyio.fail_after(120):
            while not server.started:
                await anyio.sleep(0.001)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@dataclass
class Answer:
    """What an application sent, message by message."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    #: Set by a test: the client leaves.
    left: anyio.Event = field(default_factory=anyio.Event)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        pairs = self.messages[0]["headers"]
        return {name.decode(): value.decode() for name, value in pairs}

    async def take(self, message: dict[str, Any]) -> None:
        """What the application sends."""
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each event; None is the one that ends them."""
        lines = self.body.decode().split("\n\n")
        data = [line.rpartition("data: ")[2] for line in lines if line]
        return [None if each == "[DONE]" else json.loads(each) for each in data]

    @property
    def whole(self) -> bool:
        last = self.messages[-1] if self.messages else {}
        return last.get("type") == "http.response.body" and not last.get("more_body", False)


async def ask(
    app: Any,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
    answer: Answer | None = None,
    parts: list[bytes] | None = None,
) -> Answer:
    """One request as an ASGI server makes it. `body` is sent as JSON; `parts` as they are, with the
    end of the body only if the client has not left."""
    answer = Answer() if answer is None else answer
    sent = parts if parts is not None else [b"" if body is None else json.dumps(body).encode()]
    given = {"content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": method or ("GET" if body is None and parts is None else "POST"),
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    requests = [{"type": "http.request", "body": part, "more_body": True} for part in sent]
    if not answer.left.is_set():
        requests[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop(0)
        await answer.left.wait()
        return {"type": "http.disconnect"}

    await app(scope, receive, answer.take)
    return answer
