"""Bodies of requests: large ones are parsed beside the event loop, and to the same values."""

from __future__ import annotations

import gc
import json
import math
import re
import threading
from json import decoder
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncinfer import Engine, InvalidRequest
from asyncinfer.bounds import MAX_BODY_CONTAINERS
from asyncinfer.server import body as body_module
from asyncinfer.server import create_app
from asyncinfer.server.body import Bodies
from asyncinfer.server.errors import HttpError
from asyncinfer.server.prompts import call_arguments
from asyncinfer.testing import FakeModel

pytestmark = pytest.mark.anyio


def sending(*parts: bytes) -> Any:
    """What an ASGI application receives."""
    left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    left.append({"type": "http.request", "body": b""})

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    return receive


def read(data: bytes, small: int) -> Any:
    """What a body is read as, or why it is refused; `small` bytes are parsed on the spot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "SMALL", small)
        try:
            return anyio.run(Bodies(1 << 20).read, sending(data))[0]
        except HttpError as error:
            return error.status
        except InvalidRequest as error:
            return str(error)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(body=st.dictionaries(st.text(), VALUES), ascii=st.booleans(), cut=st.integers(0, 400))
def test_both_ways_to_parse_agree(body: Any, ascii: bool, cut: int) -> None:
    """Also about what is none."""
    data = json.dumps(body, ensure_ascii=ascii).encode("utf-8", "replace")
    whole = {name: value for name, value in json.loads(data).items() if value is not None}
    assert read(data, 0) == read(data, 1 << 20) == whole
    damaged = data[:cut] + data[cut + 1 :]
    assert read(damaged, 0) == read(damaged, 1 << 20)


@pytest.mark.parametrize(
    "data",
    [
        *(b"{", b"[1]", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": "\xff"}', b"[" * 100_000),
        *(b'{"a": 1e999}', b'{"a": [%s-1e400, 2]}' % (b"0, " * 99)),
        *(b"", b"7", b" ", b"{} {}", b'{"a": 1}]', b'\x0b{"a": 1}', b'{"a": 1}\x00'),
    ],
)
def test_both_refuse_the_same(data: bytes) -> None:
    told = read(data, 0)
    assert told == read(data, 1 << 20)
    assert told == 400 or "must be a JSON object" in told


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": 1'])
def test_arguments_that_are_no_json_go_back_as_they_came(arguments: str) -> None:
    """A model has written them, and its conversation goes on."""
    assert call_arguments("here", arguments) == arguments


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16", "utf-32-be"])
@pytest.mark.parametrize("text", ['{"a": 1}', ' \n\r\t{ "a": 1 }\n\r\t '])
def test_encodings_and_spaces(encoding: str, text: str) -> None:
    data = text.encode(encoding)
    assert read(data, 0) == read(data, 1 << 20) == {"a": 1}


NUMBERS = st.integers(-(10**20), 10**20) | st.floats(-1e300, 1e300) | st.sampled_from([0, 7, -1])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    numbers=st.lists(NUMBERS, max_size=40),
    others=st.lists(NUMBERS | st.text(max_size=3) | st.lists(NUMBERS, max_size=30), max_size=3),
    comma=st.sampled_from([",", " ,", ",\n\t", ",,", ", ,", ",]", ""]),
    at=st.integers(0, 600),
)
def test_lists_of_numbers_are_parsed_alike(numbers: Any, others: Any, comma: str, at: int) -> None:
    """Also where a comma is at a wrong place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_FEW", 1)
        patch.setattr(body_module, "_NUMBERS", re.compile(r"[-+.,0-9eE \t\n\r]{1,40}"))
        for listed in (numbers + others, others + numbers):
            data = json.dumps({"a": listed})
            for text in (data, data[:at] + comma + data[at:]):
                assert read(text.encode(), 0) == read(text.encode(), 1 << 20)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_the_event_loop_turns_while_a_large_body_is_parsed(
    monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    parsing, turned = threading.Event(), threading.Event()
    parse = decoder.JSONObject  # type: ignore[attr-defined]

    def wait(*given: Any) -> Any:
        # In the middle of it.
        parsing.set()
        assert turned.wait(60)
        return parse(*given)

    async def turn() -> None:
        while not parsing.is_set():
            await anyio.sleep(0.001)
        turned.set()

    monkeypatch.setattr(decoder, "JSONObject", wait)
    objects = [{"number": number} for number in range(4000)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turn)
        found, _ = await Bodies(1 << 20).read(sending(json.dumps({"all": objects}).encode()))
    assert found == {"all": objects}
    assert turned.is_set()


async def test_objects_and_arrays_are_bounded() -> None:
    most = MAX_BODY_CONTAINERS - 2
    bodies = Bodies(1 << 20)
    one: Any
    for one in ([], {}):
        data = json.dumps({"a": [one] * most}).encode()
        assert (await bodies.read(sending(data)))[0] == {"a": [one] * most}
        with pytest.raises(HttpError, match="more than 16384 objects and arrays"):
            await bodies.read(sending(json.dumps({"a": [one] * (most + 1)}).encode()))


async def test_the_bytes_of_all_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "MOST_READ", 1)
    bodies, begun, go_on = Bodies(10), anyio.Event(), anyio.Event()

    async def slow() -> dict[str, Any]:
        if not begun.is_set():
            begun.set()
            return {"type": "http.request", "body": b'{"a":1', "more_body": True}
        await go_on.wait()
        return {"type": "http.request", "body": b"}"}

    async def first() -> None:
        assert await bodies.read(slow) == ({"a": 1}, 7)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(HttpError, match="10 bytes of requests are being read") as caught:
            await bodies.read(sending(b'{"b"', b":1}"))
        assert caught.value.status == 429
        assert bodies.held == 6
        go_on.set()
    assert bodies.held == 0
    assert await bodies.read(sending(b'{"b"', b":1}")) == ({"b": 1}, 7)
    assert await bodies.read(sending(b'{"b"', b":1   }")) == ({"b": 1}, 10)
    with pytest.raises(HttpError) as caught:
        await bodies.read(sending(b'{"b"', b":1    }"))
    assert caught.value.status == 413
    assert bodies.held == 0


#: Entries of a list that nothing else has.
MANY = 777


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [7] * MANY, "max_tokens": 2}, 200),
        ({"prompt": [7] * MANY, "max_tokens": 2, "stream": True}, 200),
        ({"prompt": [[7] * MANY, [7] * MANY], "max_tokens": 2}, 200),
        ({"prompt": [9999] * MANY}, 400),
        ({"prompt": [9999] * MANY, "stream": True}, 400),
        ({"prompt": [7] * MANY, "max_tokenz": 2}, 400),
        ({"prompt": [7] * MANY, "model": "none"}, 404),
    ],
)
async def test_a_body_is_gone_with_its_answer(
    body: dict[str, Any], status: int, anyio_backend: str
) -> None:
    """A body that waits for the garbage collector holds an event loop up when that comes: 45 ms
    for the token ids of six megabytes."""
    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    def kept() -> list[Any]:
        young = gc.get_objects(generation=0)
        return [each for each in young if type(each) is list and len(each) == MANY]

    async with Engine(FakeModel(strict=False, max_context=4096), max_running=1) as engine:
        app = create_app(engine)
        data = json.dumps({"model": "FakeModel", **body}).encode()
        parts = [{"type": "http.request", "body": data}]

        async def receive() -> Any:
            if not parts:
                await anyio.Event().wait()
            return parts.pop()

        del body
        gc.collect()
        gc.disable()
        try:
            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
            await app({**scope, "headers": headers, "query_string": b""}, receive, send)
            # The fake model keeps the last prompt of its slot.
            await engine.generate("other", max_tokens=1)
            with anyio.fail_after(120):
                # The decode thread lets go of an answered request a moment later.
                while kept():
                    await anyio.sleep(0.001)
        finally:
            gc.enable()
    assert answers[0]["status"] == status


async def test_a_body_that_has_arrived_is_parsed_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []

    async def noting(size: int, work: Any, argument: Any) -> Any:
        limits.append(anyio.current_effective_deadline())
        return work(argument)

    monkeypatch.setattr(body_module, "offload_large", noting)
    assert await Bodies(100).read(sending(b"{}"), 60.0) == ({}, 2)
    assert limits == [math.inf]
