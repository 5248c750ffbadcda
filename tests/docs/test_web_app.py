"""The web applications of README.md and docs/embedding.md, driven as an ASGI server drives them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from docs.test_docs import blocks
from starlette.requests import ClientDisconnect

import asyncinfer
from asyncinfer.testing import FakeModel, StepGate

ROOT = Path(__file__).resolve().parents[2]


#: Steps that bring some text, and no end of an answer.
FEW = 20


async def held(gate: StepGate, before: int) -> None:
    """Until a step more than `before` waits at the gate, and every task for something."""
    with anyio.fail_after(120):
        while gate.arrived <= before:
            await anyio.sleep(0.001)
    # What the steps before it brought is on its way.
    await anyio.lowlevel.checkpoint()
    await anyio.wait_all_tasks_blocked()


class Response:
    """What a handler sent, message by message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.begun = anyio.Event()
        self.left = anyio.Event()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def whole(self) -> bool:
        last = self.messages[-1] if self.messages else {}
        return last.get("type") == "http.response.body" and not last.get("more_body")


class Server:
    """The application's other side."""

    def __init__(self, app: Any, state: dict[str, Any]) -> None:
        self._app = app
        self._state = state

    @property
    def engine(self) -> asyncinfer.Engine:
        engine = self._state["engine"]
        assert isinstance(engine, asyncinfer.Engine)
        return engine

    async def get(self, path: str) -> Response:
        response = Response()
        await self._ask("GET", path, b"", response, "2.3")
        return response

    async def post(
        self, body: bytes, response: Response | None = None, spec_version: str = "2.3"
    ) -> Response:
        response = Response() if response is None else response
        await self._ask("POST", "/complete", body, response, spec_version)
        return response

    async def _ask(
        self, method: str, path: str, body: bytes, response: Response, spec_version: str
    ) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [],
            "state": dict(self._state),
        }
        requests = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop()
            await response.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if response.left.is_set() and spec_version >= "2.4":
                raise OSError("the client has left")
            response.messages.append(message)
            if message["type"] == "http.response.body":
                response.begun.set()

        await self._app(scope, receive, send)

    async def until(self, **stats: int) -> None:
        with anyio.fail_after(120):
            while any(getattr(self.engine.stats(), name) != at for name, at in stats.items()):
                await anyio.sleep(0.001)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[Server]:
    """The application between the two halves of its lifespan."""
    state: dict[str, Any] = {}
    to_app, from_server = anyio.create_memory_object_stream[dict[str, Any]](1)
    from_app, to_server = anyio.create_memory_object_stream[dict[str, Any]](2)
    with to_app, from_server, from_app, to_server:
        async with anyio.create_task_group() as tasks:
            scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": state}
            tasks.start_soon(app, scope, from_server.receive, from_app.send)
            await to_app.send({"type": "lifespan.startup"})
            assert (await to_server.receive())["type"] == "lifespan.startup.complete"
            yield Server(app, state)
            await to_app.send({"type": "lifespan.shutdown"})
            assert (await to_server.receive())["type"] == "lifespan.shutdown.complete"


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture(params=["README.md", "docs/embedding.md"])
def code(request: pytest.FixtureRequest) -> str:
    page = request.param
    (block,) = (
        block
        for block in blocks((ROOT / page).read_text("utf-8"), page)
        if "app = Starlette(" in block.code
    )
    return block.code


@pytest.fixture
def app(code: str, gate: StepGate) -> Any:
    """The page's application on a fake model that holds two requests and computes one."""
    model = FakeModel(gate=gate, strict=False)

    def engine(**options: Any) -> asyncinfer.Engine:
        return asyncinfer.Engine(model, **{**options, "max_requests": 2, "max_running": 1})

    module: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "page", "exec", dont_inherit=True), module)
    module["Engine"] = engine
    return module["app"]


def test_an_answer_and_refusals(app: Any, gate: StepGate) -> None:
    async def main() -> None:
        async with serving(app) as server:
            good = await server.post(b"hello")
            assert (good.status, good.whole) == (200, True)
            assert len(good.messages) > 100, "chunk by chunk"
            assert server.engine.stats().generated_tokens == 256
            bad = await server.post(b"\xff")
            assert (bad.status, bad.whole) == (400, True)
            assert b"prompt" in bad.body
            gate.close()
            before = gate.arrived
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(server.post, b"hello")
                await held(gate, before)
                refused = await server.post(b"hello")
                assert (refused.status, refused.whole) == (429, True)
                assert int(refused.headers[b"retry-after"]) >= 1
                gate.open()

    anyio.run(main)


def test_a_deadline_before_the_first_token_has_its_status(
    app: Any, gate: StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = asyncinfer.Engine.stream

    def impatient(self: asyncinfer.Engine, prompt: Any, **options: Any) -> asyncinfer.Stream:
        assert options["deadline"] == 30
        return stream(self, prompt, **{**options, "deadline": 0.05})

    async def main() -> None:
        async with serving(app) as server:
            gate.close()
            before = gate.arrived
            response = Response()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.post, b"first")
                await held(gate, before)
                monkeypatch.setattr(asyncinfer.Engine, "stream", impatient)
                tasks.start_soon(server.post, b"second", response)
                await anyio.wait_all_tasks_blocked()
                await anyio.sleep(0.06)
                gate.open()
            assert (response.status, response.whole) == (504, True)

    anyio.run(main)


@pytest.mark.parametrize("when", ["before the first token", "in the middle"])
def test_a_client_that_leaves_ends_its_request(app: Any, gate: StepGate, when: str) -> None:
    async def main() -> None:
        async with serving(app) as server:
            before = gate.arrived
            gate.close()
            response = Response()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.post, b"hello", response)
                if when == "in the middle":
                    gate.let(FEW)
                    await response.begun.wait()
                    before += FEW
                await held(gate, before)
                response.left.set()
                # Its handler has asked for the end when it waits for it.
                await anyio.wait_all_tasks_blocked()
                gate.open()
            await server.until(aborted=1, running=0)
            assert not response.whole

    anyio.run(main)


def test_a_client_whose_leaving_shows_when_something_is_sent(app: Any, gate: StepGate) -> None:
    """ASGI 2.4: Starlette does not listen for it then."""

    async def main() -> None:
        async with serving(app) as server:
            response = Response()
            left = []

            async def answer() -> None:
                with pytest.raises(ClientDisconnect):
                    await server.post(b"hello", response, "2.4")
                left.append(True)

            gate.close()
            gate.let(FEW)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answer)
                await held(gate, FEW)
                response.left.set()
                gate.let(FEW)
                # Its handler has met the error when it waits for the end of the request.
                with anyio.fail_after(120):
                    while gate.arrived <= 2 * FEW and not left:
                        await anyio.sleep(0.001)
                await anyio.lowlevel.checkpoint()
                await anyio.wait_all_tasks_blocked()
                gate.open()
            assert left
            await server.until(aborted=1, running=0)

    anyio.run(main)


@pytest.mark.parametrize("code", ["docs/embedding.md"], indirect=True)
def test_probes(app: Any) -> None:
    async def main() -> None:
        async with serving(app) as server:
            found = await server.get("/health")
            assert (found.status, found.body) == (200, b'{"state":"open","reasons":[]}')
            await server.engine.aclose()
            found = await server.get("/health")
            assert found.status == 503
            assert b'"state":"closed"' in found.body
            assert (await server.post(b"hello")).status == 503

    anyio.run(main)
