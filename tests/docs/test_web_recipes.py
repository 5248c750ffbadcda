"""The application of docs/web.md, driven as an ASGI server drives it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from docs.test_docs import blocks
from docs.test_web_app import FEW, Response, held, serving

import asyncinfer
from asyncinfer import errors
from asyncinfer.testing import FakeModel, StepGate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "web.md"


class Gate:
    """Lets steps through as its `gate` does, until the model is broken."""

    def __init__(self) -> None:
        self.gate = StepGate()
        self.broken = False

    def __call__(self, phase: Any, step: Any) -> None:
        self.gate(phase, step)
        if self.broken:
            raise OSError("secret/path fell off")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def module(gate: Gate) -> dict[str, Any]:
    """The page's code on a fake model that holds two requests and computes one."""
    model = FakeModel(gate=gate, strict=False)

    def engine(**options: Any) -> asyncinfer.Engine:
        return asyncinfer.Engine(model, **{**options, "max_requests": 2, "max_running": 1})

    module: dict[str, Any] = {"__name__": "page"}
    for block in blocks(PAGE.read_text("utf-8"), "docs/web.md"):
        if "app = Starlette(" in block.code or block.note == "continues":
            exec(compile(block.code, "page", "exec", dont_inherit=True), module)
    module["Engine"] = engine
    return module


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hello", **fields}).encode()


def test_every_error_has_a_status(module: dict[str, Any]) -> None:
    """In the code, and in the table above it."""
    text = PAGE.read_text("utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    table = {
        name.strip(" `"): int(row[2].split(",")[0]) for row in rows for name in row[1].split(",")
    }
    code = {kind.__name__: status for kind, status in module["STATUS"].items()}
    assert code == table
    assert code.keys() == {*errors.__all__} - {"AsyncInferError"}


def test_answers_and_refusals(module: dict[str, Any], gate: Gate) -> None:
    async def main() -> None:
        async with serving(module["app"]) as server:
            done = await server.post(body())
            assert done.status == 200
            assert json.loads(done.body)["finish_reason"] == "length"
            streamed = await server.post(body(stream=True))
            assert (streamed.status, streamed.whole) == (200, True)
            *events, last, nothing = streamed.body.decode().split("\n\n")
            assert (last, nothing) == ("data: [DONE]", "")
            texts = [json.loads(each.removeprefix("data: "))["text"] for each in events]
            assert len(texts) > 100, "chunk by chunk"
            assert "".join(texts) != ""
            assert json.loads(done.body)["text"] != ""
            for wrong in ({"prompt": 3}, {"max_tokens": -1}):
                for stream in (False, True):
                    bad = await server.post(body(**wrong, stream=stream))
                    assert (bad.status, bad.whole) == (400, True)
                    assert json.loads(bad.body)["field"] == next(iter(wrong))
            for unreadable in (b"\xff", b"[]", b"[" * 100_000):
                assert (await server.post(unreadable)).status == 400
            assert (await server.post(b" " * (module["MOST_BYTES"] + 1))).status == 413
            gate.gate.close()
            before = gate.gate.arrived
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(server.post, body())
                await held(gate.gate, before)
                for stream in (False, True):
                    refused = await server.post(body(stream=stream))
                    assert (refused.status, refused.whole) == (429, True)
                    assert int(refused.headers[b"retry-after"]) >= 1
                gate.gate.open()
            await server.engine.aclose()
            assert (await server.post(body())).status == 503

    anyio.run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(
    module: dict[str, Any], gate: Gate, stream: bool
) -> None:
    async def main() -> None:
        async with serving(module["app"]) as server:
            before = gate.gate.arrived
            gate.gate.close()
            response = Response()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.post, body(stream=stream), response)
                gate.gate.let(FEW)
                await held(gate.gate, before + FEW)
                response.left.set()
                # Its handler has asked for the end when it waits for it.
                await anyio.wait_all_tasks_blocked()
                gate.gate.open()
            await server.until(aborted=1, running=0)
            assert server.engine.stats().generated_tokens < 256

    anyio.run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_prefill(module: dict[str, Any], gate: Gate, stream: bool) -> None:
    """ASGI 2.4, where Starlette listens for nobody that leaves."""

    async def main() -> None:
        async with serving(module["app"]) as server:
            before = gate.gate.arrived
            gate.gate.close()
            response = Response()

            async def asked() -> None:
                # What is sent to a client that has left.
                with suppress(OSError):
                    await server.post(body(stream=stream), response, "2.4")

            with anyio.fail_after(120):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(asked)
                    await held(gate.gate, before)
                    response.left.set()
            # No token has come by then.
            gate.gate.open()
            await server.until(aborted=1, running=0)

    anyio.run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_breaks(module: dict[str, Any], gate: Gate, stream: bool) -> None:
    """Before the first token it is a status, after it an event; neither says why."""

    async def main() -> None:
        async with serving(module["app"]) as server:
            before = gate.gate.arrived
            gate.gate.close()
            response = Response()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.post, body(stream=stream), response)
                gate.gate.let(FEW)
                await held(gate.gate, before + FEW)
                gate.broken = True
                gate.gate.open()
            assert response.whole
            assert response.status == (200 if stream else 500)
            assert response.body.endswith(b'{"error": "the request failed"}\n\n') or not stream
            after = await server.post(body(stream=stream))
            assert (after.status, json.loads(after.body)) == (500, {"error": "the request failed"})
            assert b"secret" not in response.body + after.body

    anyio.run(main)


class Socket:
    """A websocket's other side, which sends `prompt`, unless that is None, and leaves when told."""

    def __init__(self, prompt: str | None, *, raises: bool = False) -> None:
        """`raises`: as servers do that tell of a client that has left, by what is sent to it."""
        self.messages: list[dict[str, Any]] = []
        self.left = anyio.Event()
        self._raises = raises
        self._sent: list[dict[str, Any]] = [{"type": "websocket.connect"}]
        if prompt is not None:
            self._sent.append({"type": "websocket.receive", "text": prompt})

    async def talk(self, module: dict[str, Any], engine: asyncinfer.Engine) -> None:
        scope = {
            "type": "websocket",
            "path": "/talk",
            "headers": [],
            "query_string": b"",
            "state": {"engine": engine},
        }
        await module["app"](scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._sent:
            return self._sent.pop(0)
        if not self._raises:
            await self.left.wait()
            return {"type": "websocket.disconnect", "code": 1001}
        await anyio.sleep_forever()
        raise AssertionError

    async def _send(self, message: dict[str, Any]) -> None:
        if self._raises and self.left.is_set():
            raise OSError("the client has left")
        self.messages.append(message)

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(each["text"]) for each in self.messages if "text" in each]


def test_an_answer_over_a_websocket(module: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving(module["app"]) as server:
            socket = Socket("hello")
            await socket.talk(module, server.engine)
            assert len(socket.told) > 100, "chunk by chunk"
            assert {*socket.told[0]} == {"text"}
            assert [each["type"] for each in (socket.messages[0], socket.messages[-1])] == [
                "websocket.accept",
                "websocket.close",
            ]
            wrong = Socket("\ud800")
            await wrong.talk(module, server.engine)
            assert [each["field"] for each in wrong.told] == ["prompt"]
            gone = Socket(None)
            gone.left.set()
            await gone.talk(module, server.engine)
            assert gone.told == []

    anyio.run(main)


@pytest.mark.parametrize("raises", [False, True])
def test_who_leaves_a_websocket_ends_its_request(
    module: dict[str, Any], gate: Gate, raises: bool
) -> None:
    async def main() -> None:
        async with serving(module["app"]) as server:
            before = gate.gate.arrived
            gate.gate.close()
            socket = Socket("hello", raises=raises)
            with anyio.fail_after(120):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(socket.talk, module, server.engine)
                    gate.gate.let(FEW)
                    await held(gate.gate, before + FEW)
                    socket.left.set()
                    # Its handler has asked for the end when it waits for it.
                    await anyio.wait_all_tasks_blocked()
                    gate.gate.open()
            await server.until(aborted=1, running=0)
            assert server.engine.stats().generated_tokens < 256

    anyio.run(main)
