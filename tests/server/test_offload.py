"""Work beside the event loop is bounded, whoever left that waited for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from server.chat_model import CHAT, EVERY_LOOP, ChatModel, ask
from support import Until

from asyncinfer import Engine
from asyncinfer.engine import EngineTokenizer
from asyncinfer.server import create_app
from asyncinfer.server.offload import MOST_OFFLOADED, offload

pytestmark = pytest.mark.anyio


class Works:
    """Each call waits until the test lets it go."""

    def __init__(self) -> None:
        self.began = self.now = self.most = 0
        self.goes_on = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, *_: Any, **__: Any) -> list[int]:
        with self._lock:
            self.began += 1
            self.now += 1
            self.most = max(self.most, self.now)
        assert self.goes_on.wait(60.0)
        with self._lock:
            self.now -= 1
        return [1, 2]


@EVERY_LOOP
async def test_who_leaves_makes_no_room_for_another(until: Until) -> None:
    works, done = Works(), []

    async def wait() -> None:
        done.append(await offload(works))

    try:
        for _ in range(3):
            async with anyio.create_task_group() as hasty:
                for _ in range(4):
                    hasty.start_soon(wait)
                await until(lambda: works.began == MOST_OFFLOADED)
                hasty.cancel_scope.cancel()
        async with anyio.create_task_group() as patient:
            for _ in range(3):
                patient.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            assert works.began == MOST_OFFLOADED
            works.goes_on.set()
    finally:
        works.goes_on.set()
    assert done == [[1, 2]] * 3
    assert (works.began, works.most) == (MOST_OFFLOADED + 3, MOST_OFFLOADED)


@EVERY_LOOP
async def test_what_fails_makes_room() -> None:
    def fails() -> None:
        raise ValueError("no")

    for _ in range(2 * MOST_OFFLOADED):
        with pytest.raises(ValueError, match="no"):
            await offload(fails)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await offload(fails)
    assert await offload(lambda: 5) == 5


TEXT = "x" * 40
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "encode": ("/tokenize", {"prompt": TEXT}),
    "encode_chat": ("/tokenize", {"messages": CHAT}),
    "decode": ("/detokenize", {"tokens": [1, 2]}),
    "count": ("/v1/messages/count_tokens", {"messages": CHAT[1:]}),
}


@pytest.mark.parametrize("method", [*BODIES, "echo"])
async def test_few_prompts_are_read_at_once(
    method: str, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    """Each may take a gigabyte."""
    echo = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 1}
    path, body = BODIES.get(method, ("/v1/completions", echo))
    works = Works()

    def patched(call: Callable[..., Any]) -> None:
        monkeypatch.setattr(EngineTokenizer, "encode" if method == "echo" else method, call)

    async with Engine(ChatModel()) as engine, anyio.create_task_group() as group:
        app = create_app(engine)
        patched(works)
        for _ in range(6):
            group.start_soon(ask, app, path, body)
        await until(lambda: works.began >= MOST_OFFLOADED)
        works.goes_on.set()
    assert works.most <= MOST_OFFLOADED


async def test_a_thread_that_cannot_be_started_makes_room_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(anyio.to_thread, "run_sync", failing)
        for _ in range(MOST_OFFLOADED):
            with pytest.raises(RuntimeError, match="can't start"):
                await offload(dict)
    with anyio.fail_after(120):
        assert await offload(dict) == {}
