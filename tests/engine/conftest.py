"""Engines on the fake model, and waiting without sleeping."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from support import OpenEngine, Until

from asyncinfer import Engine
from asyncinfer.testing import FakeModel, StepGate


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
def open_engine(gate: StepGate) -> OpenEngine:
    """`async with open_engine(**config)`: an engine whose steps pass `gate`. Closing checks that
    nothing was lost."""

    @asynccontextmanager
    async def opened(model: FakeModel | None = None, **config: Any) -> AsyncIterator[Engine]:
        source = model or FakeModel(gate=gate)
        config.setdefault("drain_timeout", 0.0)
        async with Engine(source, **config) as engine:
            try:
                yield engine
            finally:
                gate.open()
        stats = engine.stats()
        assert stats.running == stats.waiting == stats.paused == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert engine._admission.held == 0
        assert not engine._frontend.core.jobs.live  # type: ignore[union-attr]

    return opened


@pytest.fixture
def until() -> Until:
    """Yield to other tasks and threads until a condition holds; the test's limit is 30 s."""

    async def wait(condition: Callable[[], object]) -> None:
        with anyio.fail_after(30):
            while not condition():
                # A turn of the loop; the engine's thread runs meanwhile.
                await anyio.sleep(0.001)

    return wait
