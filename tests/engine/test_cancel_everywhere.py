"""Cancel a consumer at its k-th suspension, for every k: nothing is lost, nothing leaks."""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Generator
from typing import Any

import anyio
import pytest
from support import OpenEngine, Until, oracle, places

from asyncinfer import Engine, EngineStats

pytestmark = pytest.mark.anyio


class CancelAtKth:
    """Awaits `work`; when it suspends for the k-th time, `scope` is cancelled."""

    def __init__(self, work: Coroutine[Any, Any, None], k: int, scope: anyio.CancelScope) -> None:
        self.work, self.left, self.scope = work, k, scope

    def __await__(self) -> Generator[Any, Any, None]:
        inner = self.work.__await__()
        resume: Any = lambda: inner.send(None)  # noqa: E731
        while True:
            try:
                trap = resume()
            except StopIteration:
                return
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()
            try:
                value = yield trap
            except BaseException as error:
                resume = lambda error=error: inner.throw(error)  # noqa: E731
            else:
                resume = lambda value=value: inner.send(value)  # noqa: E731


def nothing_is_held(stats: EngineStats) -> bool:
    live = stats.running + stats.waiting + stats.paused
    return live == 0 and stats.blocks_free + stats.blocks_cached == stats.blocks_total


async def one_consumer(engine: Engine, got: dict[str, list[int]]) -> None:
    async with engine.stream("first", max_tokens=12, temperature=0.0) as stream:
        async for chunk in stream:
            got["first"] += chunk.token_ids
    # Long enough for a worker thread to prepare it.
    async with engine.stream("x" * 1500, max_tokens=8, temperature=0.0) as long:
        got["long"] += (await anext(long)).token_ids
        long.stop()
        async for chunk in long:
            got["long"] += chunk.token_ids
    got["whole"] += (await engine.generate("whole", max_tokens=6, temperature=0.0)).token_ids
    left = engine.stream("left", max_tokens=1000, temperature=0.0, buffer=4)
    try:
        got["left"] += (await anext(left)).token_ids
    finally:
        await left.aclose()


# faults 1, 6, 7, 9, 10
async def test_cancelled_at_every_suspension(open_engine: OpenEngine, until: Until) -> None:
    async with open_engine() as engine:
        want = {
            name: oracle(engine, prompt, 12)
            for name, prompt in {
                "first": "first",
                "long": "x" * 1500,
                "whole": "whole",
                "left": "left",
            }.items()
        }
        for k in range(1, 500):
            got: dict[str, list[int]] = {name: [] for name in want}
            with anyio.CancelScope() as scope:
                await CancelAtKth(one_consumer(engine, got), k, scope)
            for name, tokens in got.items():
                assert tokens == want[name][: len(tokens)], f"k={k}"
            await until(lambda: places(engine) == 0)
            # The counters are written when the turn is over that gave the place back.
            await until(lambda: nothing_is_held(engine.stats()))
            if not scope.cancelled_caught:
                assert len(got["first"]) == 12
                assert len(got["whole"]) == 6
                break
        else:
            raise AssertionError("never ran to its end")
        assert k > 3


async def test_opening_cancelled_at_every_suspension(until: Until) -> None:
    from asyncinfer.testing import FakeModel

    def threads() -> set[threading.Thread]:
        # Trio keeps threads of its own for later.
        return {each for each in threading.enumerate() if not each.name.startswith("Trio thread")}

    before = threads()

    async def open_and_close() -> None:
        async with Engine(FakeModel(blocks=32)) as engine:
            await engine.generate("x", max_tokens=2)

    for k in range(1, 100):
        with anyio.CancelScope() as scope:
            await CancelAtKth(open_and_close(), k, scope)
        await until(lambda: threads() <= before)
        if not scope.cancelled_caught:
            break
    else:
        raise AssertionError("never ran to its end")
