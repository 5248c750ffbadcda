"""Under asyncio's own runners, without anyio's: pytest-asyncio on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop
from support import fake_runner, oracle

from asyncinfer import Engine
from asyncinfer.testing import FakeModel


async def two_hundred_agents() -> None:
    """Cancelled, timed out, stopped and finished side by side."""
    async with Engine(FakeModel(blocks=400), drain_timeout=0.0) as engine:
        want = oracle(engine, "agent", 40)

        async def agent(i: int) -> str:
            got: list[int] = []
            try:
                async with asyncio.timeout(0.02 if i % 4 == 1 else None):
                    async with engine.stream("agent", max_tokens=40, temperature=0.0) as stream:
                        async for chunk in stream:
                            got += chunk.token_ids
                            if i % 4 == 2 and len(got) == i % 17 + 1:
                                stream.stop()
                            if i % 4 == 3 and len(got) > i % 13:
                                raise asyncio.CancelledError
                            await asyncio.sleep(0)
            except TimeoutError:
                return "timed out"
            finally:
                assert got == want[: len(got)]
            return "whole" if len(got) == 40 else "part"

        ends = await asyncio.gather(*map(agent, range(200)), return_exceptions=True)
        assert sum(isinstance(end, asyncio.CancelledError) for end in ends) == 50
        assert [end for i, end in enumerate(ends) if i % 4 == 0] == ["whole"] * 50
        assert fake_runner(engine).launched > 0
    assert engine.stats().running == engine.stats().waiting == 0


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_agents_under_a_plain_runner(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(two_hundred_agents())


@pytest.mark.asyncio
async def test_agents_under_pytest_asyncio() -> None:
    await two_hundred_agents()
