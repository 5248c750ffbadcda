"""The application's paths as an ASGI server sees them: refusals, keys, bounds, clients that
leave."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import httpx2
import pytest
from remote.wire import wires
from server.chat_model import CHAT, EVERY_LOOP, Answer, ChatModel, ask, listening
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send
from support import Until, places

from asyncinfer import Engine, InvalidConfig, RequestFailed
from asyncinfer.remote import RemoteEngine
from asyncinfer.server import ApiKey, create_app
from asyncinfer.server import body as body_module
from asyncinfer.server.errors import http_error
from asyncinfer.stats import AdapterInfo
from asyncinfer.testing import StepGate

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "xml"}}}
WRONG = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
LONG = {"x" * 100_000: "\ud800"}
LONG_PLACE = f"messages[2].{'x' * 241}..."
CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
async def engine(gate: StepGate) -> AsyncIterator[Engine]:
    async with Engine(ChatModel(gate=gate), max_requests=4) as engine:
        yield engine
        gate.open()


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        (CHATS, {}, "messages", "is missing"),
        (CHATS, {"messages": []}, "messages", "must be a list"),
        (CHATS, {"messages": [*CHAT, {"role": "user"}]}, "messages[2].content", "is missing"),
        (CHATS, {"messages": CHAT, "temprature": 1}, "temprature", "did you mean temperature"),
        (CHATS, {"messages": CHAT, "x" * 100_000: 1}, "x" * 80, "is no field"),
        (CHATS, {"messages": CHAT, "temperature": -1}, "temperature", "must be"),
        (CHATS, {"messages": CHAT, "stream": "yes"}, "stream", "true or false"),
        (CHATS, {"messages": CHAT, "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (CHATS, {"messages": CHAT, "logprobs": True, "top_logprobs": 999}, "top_logprobs", "128"),
        (
            CHATS,
            {"messages": CHAT, "max_completion_tokens": -1},
            "max_completion_tokens",
            "must be",
        ),
        (CHATS, {"messages": CHAT, "n": 9}, "n", "max_requests=4"),
        (CHATS, {"messages": CHAT, "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        (CHATS, {"messages": CHAT, "logit_bias": {"5": 1, "05": 2}}, "logit_bias", "token ids"),
        (CHATS, {"messages": CHAT, "logit_bias": {"1_0": 1}}, "logit_bias", "token ids"),
        (CHATS, {"messages": CHAT, "logprobs": 1}, "logprobs", "logprobs=1: must be true or"),
        (CHATS, {"messages": CHAT, "prompt": "x"}, "prompt", "is no field"),
        ("/v1/responses", {"input": "x", "max_tokens": 1}, "max_tokens", "is no field"),
        ("/v1/responses", {"input": "x", "logprobs": True}, "logprobs", "is no field"),
        ("/v1/embeddings", {"input": "x", "texts": "x"}, "texts", "is no field"),
        (CHATS, {"messages": CHAT, "stream_options": 1}, "stream_options", "object"),
        (
            CHATS,
            {"messages": CHAT, "stream_options": {"includ_usage": True}},
            "stream_options.includ_usage",
            "did you mean include_usage",
        ),
        (CHATS, {"messages": CHAT, "regex": False}, "regex", "must be"),
        (CHATS, {"messages": CHAT, "choice": False}, "choice", "must be"),
        (CHATS, {"messages": CHAT, "response_format": {"type": "xml"}}, "response_format", "type"),
        (
            CHATS,
            {"messages": CHAT, "response_format": {"type": "text", "schema": SCHEMA}},
            "response_format.schema",
            "needs type 'json_schema'",
        ),
        (
            CHATS,
            {"messages": CHAT, "response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format/properties/a",
            "type: xml",
        ),
        (
            CHATS,
            {"messages": CHAT, "response_format": {"type": "json_object", "schema": 5}},
            "response_format.schema",
            "object",
        ),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "text", "json_shema": SCHEMA}}},
            "text.format.json_shema",
            "did you mean json_schema",
        ),
        (CHATS, {"messages": CHAT, **WRONG}, "response_format/properties/a", "type: xml"),
        (CHATS, {"messages": [*CHAT, CHAT[1] | LONG]}, LONG_PLACE, "lone surrogate"),
        (COMPLETIONS, {"prompt": [{}]}, "prompt[0]", "string"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt", "at most 128"),
        (COMPLETIONS, {"prompt": ["a"] * 5}, "prompt", "5 texts, 1 answers each>: at most"),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 2, "stream": True}, "prompt", "max_requests=4"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "equal n"),
        (COMPLETIONS, {"prompt": "a", "best_of": True}, "best_of", "equal n"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "x"}, "max_tokens", "integer"),
        (COMPLETIONS, {"prompt": [70_000]}, "prompt[0]", "must be in"),
        ("/tokenize", {}, "prompt", "string"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt", "excludes messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages", "no message has any content"),
        (
            "/tokenize",
            {"messages": CHAT, "add_special_tokens": True},
            "add_special_tokens",
            "must be false with messages",
        ),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "must be in"),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it(
    engine: Engine, path: str, body: Any, param: str, told: str
) -> None:
    answer = await ask(create_app(engine), path, body)
    assert answer.status == 400
    error = answer.json["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert told in error["message"]
    assert param in error["message"]
    assert places(engine) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_more_answers_than_all_replicas_hold_are_refused(stream: bool) -> None:
    """Told to come again later, a client would for ever."""
    links = {**wires(1, max_requests=3), "large": [*wires(2, max_requests=5).values()][1]}
    async with RemoteEngine(links) as engine:
        app = create_app(engine)
        for prompts, n, fits in ((8, 1, True), (9, 1, False), (3, 2, True), (4, 2, False)):
            body = {"prompt": ["a"] * prompts, "n": n, "max_tokens": 1, "stream": stream}
            answer = await ask(app, COMPLETIONS, body)
            if fits:
                # Whether it finds room at once depends on how its prompts are routed.
                assert answer.status in (200, 429)
                continue
            assert answer.status == 400
            error = answer.json["error"]
            assert error["param"] == "prompt"
            told = f"prompt=<{prompts} texts, {n} answers each>: at most max_requests=8 answers"
            assert error["message"] == f"{told}, each prompt's on one of 2 replicas"
        answer = await ask(app, COMPLETIONS, {"prompt": ["a"] * 2, "n": 6, "max_tokens": 1})
        assert (answer.status, answer.json["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lone_surrogate_is_told_as_it_came(engine: Engine, stream: bool) -> None:
    app, half = create_app(engine), "\ud800"
    for path in (CHATS, "/v1/messages"):
        answer = await ask(app, path, {"messages": CHAT, "max_tokens": 2, half: 1})
        assert answer.status == 400
        assert answer.json["error"]["message"].startswith(f"{half}=1: is no field")
    body = {"input": "hello", "max_output_tokens": 2, "metadata": {half: half}, "stream": stream}
    answer = await ask(app, "/v1/responses", body)
    assert answer.status == 200
    told = answer.events[-1]["response"] if stream else answer.json
    assert told["metadata"] == {half: half}


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_what_is_no_text_is_refused_by_name(engine: Engine, kind: str) -> None:
    content = [{"type": "text", "text": "see"}, {"type": kind, kind: {}}]
    answer = await ask(
        create_app(engine), CHATS, {"messages": [{"role": "user", "content": content}]}
    )
    assert answer.status == 400
    assert answer.json["error"]["param"] == "messages[0].content[1].type"
    assert kind in answer.json["error"]["message"]
    assert "cannot be read" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("parts", "headers", "status"),
    [
        ([b"{"], {}, 400),
        ([b"[1]"], {}, 400),
        ([b'{"prompt": NaN}'], {}, 400),
        ([b'{"prompt": "\xff"}'], {}, 400),
        ([b"[" * 100_000], {}, 400),
        ([b'{"prompt": "\\ud800"}'], {}, 400),
        ([b"{}"], {"content-type": "text/plain"}, 415),
        ([b"\x1f\x8b"], {"content-encoding": "gzip"}, 415),
        ([b"{}"], {"content-length": "2001"}, 413),
        ([b"{" + b" " * 1000, b" " * 1000 + b"}"], {}, 413),
    ],
)
async def test_a_body_that_cannot_be_read(
    engine: Engine, parts: list[bytes], headers: dict[str, str], status: int
) -> None:
    most = 200_000 if len(parts[0]) > 2000 else 2000
    app = create_app(engine, max_body_bytes=most)
    answer = await ask(app, COMPLETIONS, parts=parts, headers=headers)
    assert answer.status == status
    assert answer.json["error"]["message"]
    assert answer.headers["x-request-id"].startswith("req_")


async def test_a_body_that_does_not_arrive(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed, since nobody knows when the rest comes."""
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.02)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    async with listening(create_app(engine)) as url:
        port = int(url.rpartition(":")[2])
        with anyio.fail_after(120):
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                await stream.send(head + b"content-length: 100\r\n\r\n{")
                answer = b"".join([part async for part in stream])
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert b"the body did not arrive" in answer


async def test_unknown_paths_methods_and_models(engine: Engine) -> None:
    app = create_app(engine)
    for path, status in (("/v1/nothing", 404), (CHATS, 405)):
        answer = await ask(app, path, headers={"x-request-id": "mine"})
        assert (answer.status, answer.headers["x-request-id"]) == (status, "mine")
        assert f"GET {path}: " in answer.json["error"]["message"]
        assert "base URL" not in answer.json["error"]["message"]
    answer = await ask(app, "/" + "x" * 6000)
    assert answer.status == 404
    assert len(answer.body) < 600
    assert (await ask(app, "/v1/v1/messages", {})).json["type"] == "error"
    for path, told in (
        ("/chat/completions", "it is /v1/chat/completions: the client's base URL must end with"),
        ("/v1/v1/messages", "it is /v1/messages: the client's base URL must end without"),
    ):
        answer = await ask(app, path, {"messages": CHAT})
        assert answer.status == 404
        assert f"{told} /v1" in answer.json["error"]["message"]
    answer = await ask(app, CHATS, {"messages": CHAT, "model": "gpt-9"})
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"
    assert "ChatModel" in answer.json["error"]["message"]
    assert (await ask(app, "/v1/models/gpt-9")).status == 404
    assert (await ask(app, "/v1/models/ChatModel")).json["max_model_len"] == 4096


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_paths_below_a_prefix_and_with_a_slash_at_the_end(
    engine: Engine, prefix: str
) -> None:
    """The slash is served, since the path that a framework gives may not be the client's."""
    app: Any = create_app(engine, page=True)
    if prefix:
        app = Starlette(routes=[Mount(prefix, app=app)])
    body = {"messages": CHAT, "max_tokens": 2}
    answer = await ask(app, f"{prefix}{CHATS}/", body, headers={"x-request-id": "a"})
    assert (answer.status, answer.headers["x-request-id"]) == (200, "a")
    assert b'path="/v1/chat/completions"' in (await ask(app, f"{prefix}/metrics/")).body
    assert (await ask(app, f"{prefix}{CHATS}/")).status == 405
    for slash in ("", "/"):
        answer = await ask(app, f"{prefix}/chat/completions{slash}", {"messages": CHAT})
        told = f"POST {prefix}/chat/completions{slash}: Not Found; it is /v1/chat/completions:"
        assert told in answer.json["error"]["message"]
        assert (await ask(app, f"{prefix}/v1/models{slash}")).json["data"][0]["id"] == "ChatModel"
        entry = await ask(app, f"{prefix}/v1/models/ChatModel{slash}")
        assert entry.json["id"] == "ChatModel"


async def test_a_mount_that_ends_paths_with_a_slash(engine: Engine) -> None:
    """Litestar's does, whatever the client sent."""
    app = create_app(engine)

    async def mount(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "path": f"{scope['path'].removeprefix('/llm')}/"}, receive, send)

    async with (
        listening(mount) as url,
        httpx2.AsyncClient(base_url=url, follow_redirects=True, timeout=120) as client,
    ):
        answer = await client.post(f"/llm{CHATS}?a=b", json={"messages": CHAT, "max_tokens": 2})
    assert (answer.status_code, answer.history) == (200, [])


async def test_several_engines_by_name(engine: Engine) -> None:
    async with Engine(ChatModel(max_context=128)) as other:
        app = create_app({"a/one": engine, "two": other, "three": other})
        listed = (await ask(app, "/v1/models")).json["data"]
        assert [each["id"] for each in listed] == ["a/one", "two", "three"]
        assert (await ask(app, "/v1/models/a/one")).json["max_model_len"] == 4096
        body = {"messages": CHAT, "max_completion_tokens": 4}
        for name in ("two", "three"):
            assert (await ask(app, CHATS, {**body, "model": name})).json["model"] == name
        assert other.stats().finished == 2
        assert (await ask(app, CHATS, body)).json["model"] == "a/one"
        assert engine.stats().finished == 1


async def test_an_engine_that_is_closed_hides_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(ChatModel()) as closed:
        pass
    loaded = (AdapterInfo("lora", 8, 1, None, 0),)
    monkeypatch.setattr(type(engine.adapters), "list", lambda _: loaded)
    app = create_app({"closed": closed, "open": engine})
    listed = (await ask(app, "/v1/models")).json["data"]
    assert [each["id"] for each in listed] == ["open", "lora"]
    for name, status in (("open", 200), ("lora", 200), ("closed", 503), ("nobody", 404)):
        assert (await ask(app, f"/v1/models/{name}")).status == status
    chat = {"messages": CHAT, "model": "nobody"}
    assert (await ask(app, CHATS, chat)).json["error"]["code"] == "model_not_found"
    assert (await ask(create_app(closed), "/v1/models")).status == 503


async def test_an_adapter_of_an_engine_of_several_names(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tuple(AdapterInfo(name, 8, 1, None, 0) for name in ("lora", "two"))
    monkeypatch.setattr(type(engine.adapters), "list", lambda _: loaded)
    app = create_app({"one": engine, "two": engine})
    assert (await ask(app, "/v1/models/lora")).json["parent"] == "one"
    # An engine's name goes first.
    assert "parent" not in (await ask(app, "/v1/models/two")).json


def reached(gate: StepGate, steps: int) -> bool:
    return gate.arrived >= steps


@EVERY_LOOP
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_a_client_that_leaves_cancels(
    engine: Engine, gate: StepGate, until: Until, path: str, stream: bool
) -> None:
    """In the first step, which computes the prompt, and between tokens."""
    app = create_app(engine)
    free = engine.stats().blocks_free
    for steps in (0, 3):
        body = {"messages": CHAT} if path == CHATS else {"prompt": "hello"}
        body |= {"stream": stream, "max_tokens": 1000}
        gate.close()
        arrived = gate.arrived
        answer = Answer()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(ask, app, path, body, answer=answer))
            for more in range(1, steps + 1):
                await until(partial(reached, gate, arrived + more))
                gate.let()
            await until(partial(reached, gate, arrived + steps + 1))
            answer.left.set()
            gate.open()
        assert answer.status == 499 or (stream and not answer.whole)
        await until(lambda: places(engine) == 0)
    stats = engine.stats()
    assert stats.aborted == 2
    await until(lambda: engine.stats().blocks_free + engine.stats().blocks_cached == free)


async def test_requests_are_counted_by_the_status_that_was_sent(engine: Engine) -> None:
    """On a server, which tells of a disconnect once an answer is whole."""
    ignored = {"prompt_cache_key": "a", "prompt_cache_options": {"ttl": "1h"}}
    bodies = [{"max_tokens": 2, "stream": stream, **ignored} for stream in (False, True)]
    async with (
        listening(create_app(engine)) as url,
        httpx2.AsyncClient(base_url=url) as client,
    ):
        for body in (*bodies, {"max_token": 2}):
            await client.post(CHATS, json={"messages": CHAT, **body})
        metrics = (await client.get("/metrics")).text
    assert f'requests_total{{path="{CHATS}",status="200"}} 2' in metrics
    assert f'requests_total{{path="{CHATS}",status="400"}} 1' in metrics
    assert "499" not in metrics


async def test_a_client_that_leaves_within_its_body(engine: Engine) -> None:
    app = create_app(engine)
    answer = Answer()
    answer.left.set()
    await ask(app, CHATS, parts=[b'{"mess'], answer=answer)
    assert (answer.status, answer.body) == (499, b"")
    metrics = (await ask(app, "/metrics")).body.decode()
    assert f'asyncinfer_http_requests_total{{path="{CHATS}",status="499"}} 1' in metrics


async def test_metrics_of_a_name_that_is_no_valid_text(engine: Engine) -> None:
    """As a folder's name in another encoding is."""
    metrics = (await ask(create_app({"caf\udce9": engine}), "/metrics")).body.decode()
    assert r'asyncinfer_running{model="caf\\udce9"} 0' in metrics


async def test_middleware_has_an_answer_when_a_client_leaves(
    engine: Engine, gate: StepGate, until: Until
) -> None:
    async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)

    middleware = [Middleware(BaseHTTPMiddleware, dispatch=pass_on)]
    app = Starlette(routes=[Mount("/llm", app=create_app(engine))], middleware=middleware)
    gate.close()
    answer = Answer()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(ask, app, f"/llm{CHATS}", {"messages": CHAT}, answer=answer))
        await until(partial(reached, gate, 1))
        answer.left.set()
        gate.open()
    await until(lambda: places(engine) == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_request_too_many_is_a_429(
    engine: Engine, gate: StepGate, until: Until, stream: bool
) -> None:
    app = create_app(engine)
    gate.close()
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(ask, app, CHATS, {"messages": CHAT, "max_tokens": 2})
        await until(lambda: places(engine) == 4)
        answer = await ask(app, CHATS, {"messages": CHAT, "stream": stream})
        gate.open()
    assert answer.status == 429
    assert answer.json["error"]["code"] == "overloaded"
    assert int(answer.headers["retry-after-ms"]) > 0


async def test_a_deadline_is_not_tried_again(engine: Engine, gate: StepGate) -> None:
    gate.close()
    body = {"messages": CHAT, "deadline": 0.01, "stream": True}
    answer = await ask(create_app(engine), CHATS, body)
    gate.open()
    assert answer.status == 504
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json["error"]["type"] == "timeout_error"


@EVERY_LOOP
async def test_an_error_in_the_middle_is_an_event(
    engine: Engine, gate: StepGate, until: Until
) -> None:
    gate.close()
    gate.let(2)
    answer = Answer()
    body = {"messages": CHAT, "stream": True, "max_tokens": 1000}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(ask, create_app(engine), CHATS, body, answer=answer))
        # The head and a chunk, which may have the tokens of both steps.
        await until(lambda: len(answer.messages) > 1)
        tasks.start_soon(partial(engine.aclose, drain_timeout=0))
        gate.open()
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == "closed"
    assert answer.whole


async def test_a_dead_engine_tells_no_secret() -> None:
    """Neither a stack nor what an exception said, with a key or without."""

    def broken(*step: Any) -> None:
        raise RuntimeError("hunter2")

    model = ChatModel()
    async with Engine(model) as engine:
        app = create_app(engine)
        assert model.runner is not None
        model.runner.gate = broken
        for _ in range(2):
            answer = await ask(app, CHATS, {"messages": CHAT})
            assert (answer.status, answer.json["error"]["code"]) == (500, "dead")
            assert "hunter2" not in str(answer.json)
        health = await ask(app, "/health")
        assert health.status == 503
        assert "hunter2" not in str(health.json)
        assert "hunter2" in str(engine.health())


def test_a_failure_tells_no_secret() -> None:
    secret = RequestFailed("req-1: hunter2")
    secret.__cause__ = ValueError("hunter2")
    assert "hunter2" not in http_error(secret).message
    own = RequestFailed("req-1: the format")
    assert http_error(own).message == "req-1: the format"


async def test_a_closed_engine_is_a_503(engine: Engine) -> None:
    app = create_app(engine)
    assert (await ask(app, "/health")).json["status"] == "ok"
    await engine.aclose()
    health = await ask(app, "/health")
    assert health.status == 503
    assert health.json["engines"]["ChatModel"]["state"] == "closed"
    assert (await ask(app, CHATS, {"messages": CHAT})).status == 503
    assert (await ask(app, "/v1/models")).status == 503
    assert "asyncinfer_running{" in (await ask(app, "/metrics")).body.decode()


async def test_keys_have_scopes_and_a_number_of_requests(
    engine: Engine, gate: StepGate, until: Until
) -> None:
    keys = {"sk-a": ApiKey(cache_scope="a", max_requests=1), "sk-b": ApiKey(cache_scope="b")}
    app = create_app(engine, keys=keys)

    async def post(key: str, name: str = "authorization", prompt: str = "x" * 64) -> Answer:
        value = f"Bearer {key}" if name == "authorization" else key
        body = {"prompt": prompt, "max_tokens": 2}
        return await ask(app, COMPLETIONS, body, headers={name: value})

    for key in ("", "sk", "sk-c"):
        answer = await post(key)
        assert answer.status == 401
        assert answer.json["error"]["code"] == "invalid_api_key"
    assert (await ask(app, "/v1/models")).status == 401
    assert (await ask(app, "/metrics")).status == 401
    assert (await ask(app, "/health")).status == 200

    def cached(answer: Answer) -> int:
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(await post("sk-a")) == 0
    assert cached(await post("sk-b", "x-api-key")) == 0
    assert cached(await post("sk-a", "x-api-key")) > 0
    gate.close()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(post, "sk-a")
        await until(lambda: places(engine) == 1)
        refused = await post("sk-a")
        assert (refused.status, places(engine)) == (429, 1)
        gate.open()
    assert (await post("sk-a")).status == 200


@pytest.mark.parametrize(
    "options",
    [
        {"keys": {"": ApiKey()}},
        {"keys": {"a": "b"}},
        # As a file has it.
        {"keys": {"secret\n": ApiKey()}},
        {"keys": {" secret": ApiKey()}},
        {"keys": {"\ud800": ApiKey()}},
        {"max_body_bytes": 0},
        {"cache_scope": "x" * 257},
        {"cors_origins": ("https://a.example", 3)},
        {"cors_origins": "nonsense"},
        {"cors_origins": "https://a.example/"},
        {"cors_origins": "https://A.example"},
        {"cors_origins": "https://a.example:443"},
        {"cors_origins": ["https://*.example"]},
        {"allowed_hosts": ("",)},
        {"keys": ["secret"]},
        {"allowed_hosts": "localhost:8000"},
        {"allowed_hosts": "https://a.example"},
        {"allowed_hosts": "a.*.example"},
    ],
)
async def test_bad_arguments_of_an_application(engine: Engine, options: Any) -> None:
    with pytest.raises(InvalidConfig, match=rf"^{next(iter(options))}(\[\d\])?=") as told:
        create_app(engine, **options)
    assert "secret" not in str(told.value)
    for engines in ({}, {"": engine}, {"a": 1}, None):
        with pytest.raises(InvalidConfig):
            create_app(engines)  # type: ignore[arg-type]


async def test_other_origins_and_hosts(engine: Engine) -> None:
    app = create_app(engine, cors_origins=["https://a.example"], allowed_hosts=["localhost"])
    here = {"host": "localhost:8000"}
    answer = await ask(app, "/health", headers={**here, "origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    answer = await ask(app, "/health", headers={**here, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in answer.headers
    for path, kind in (("/health", None), ("/v1/messages", "error")):
        refused = await ask(app, path, headers={"host": "evil.example", "x-request-id": "mine"})
        assert (refused.status, refused.headers["x-request-id"]) == (400, "mine")
        assert refused.json.get("type") == kind
        assert refused.json["error"]["message"].startswith("Host='evil.example'")
    # One may come as it is.
    one = create_app(engine, cors_origins="https://a.example")
    answer = await ask(one, "/health", headers={"origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    closed = create_app(engine)
    answer = await ask(closed, "/health", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("allowed", "host", "served"),
    [
        ("localhost", "localhost", True),
        ("localhost", "LOCALHOST:8000", True),
        ("localhost", "localhost.evil.example", False),
        ("localhost", "", False),
        ("::1", "[::1]:8000", True),
        ("[::1]", "[::1]", True),
        ("::1", "[::2]:8000", False),
        ("*.a.example", "b.a.example:80", True),
        ("*.a.example", "a.example", False),
        ("*", "anything", True),
    ],
)
async def test_hosts(engine: Engine, allowed: str, host: str, served: bool) -> None:
    answer = await ask(create_app(engine, allowed_hosts=allowed), "/health", headers={"host": host})
    assert answer.status == (200 if served else 400)


async def test_a_request_keeps_its_own_id(engine: Engine) -> None:
    app = create_app(engine)
    answer = await ask(app, "/health", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    answer = await ask(app, "/health", headers={"x-request-id": "a\x01b"})
    assert answer.headers["x-request-id"].startswith("req_")


async def test_tokens_and_texts(engine: Engine) -> None:
    app = create_app(engine)
    answer = await ask(app, "/tokenize", {"prompt": "hello"})
    assert answer.json == {"tokens": list(b"hello"), "count": 5, "max_model_len": 4096}
    chat = await ask(app, "/tokenize", {"messages": CHAT, "add_special_tokens": False})
    assert bytes(chat.json["tokens"]) == b"<system>Be brief.<user>hello<assistant>"
    back = await ask(app, "/detokenize", {"tokens": list(b"hello")})
    assert back.json == {"prompt": "hello"}


async def test_the_document_names_every_path(engine: Engine) -> None:
    app = create_app(engine)
    document = (await ask(app, "/openapi.json")).json
    paths = {route.path.replace(":path", "") for route in app.routes}  # type: ignore[attr-defined]
    paths = {path.removesuffix("/") for path in paths}
    assert set(document["paths"]) == paths
    body = document["paths"][CHATS]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["messages"]
    assert body["properties"]["temperature"]["type"] == "number"
