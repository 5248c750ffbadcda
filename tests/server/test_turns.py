"""How many requests of a crowd are read in one turn of the event loop."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.lowlevel
import pytest
from server.chat_model import CHAT, EVERY_LOOP, Answer, ChatModel, ask

from asyncinfer import Engine
from asyncinfer.engine.turn_limit import MOST
from asyncinfer.server import create_app
from asyncinfer.server.body import Bodies

CROWD = 5 * MOST


@pytest.mark.anyio
@EVERY_LOOP
async def test_a_crowd_is_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    in_turn: list[int] = []
    check = Bodies.check_length

    def counted(self: Bodies, length: bytes) -> None:
        nonlocal read
        read += 1
        check(self, length)

    monkeypatch.setattr(Bodies, "check_length", counted)
    answers = [Answer() for _ in range(CROWD)]
    async with Engine(ChatModel(strict=False)) as engine, anyio.create_task_group() as tasks:
        app = create_app(engine)

        async def watch() -> None:
            while read < CROWD:
                before = read
                await anyio.lowlevel.checkpoint()
                in_turn.append(read - before)

        tasks.start_soon(watch)
        body = {"messages": CHAT, "max_tokens": 1}
        for answer in answers:
            one = partial(ask, app, "/v1/chat/completions", body, answer=answer)
            tasks.start_soon(one)
    assert [answer.status for answer in answers] == [200] * CROWD
    # A task of trio may have its turn before or after the one that counts.
    assert max(in_turn) <= 2 * MOST
