"""Engines on the fake model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support import OpenEngine, core_of, places

from asyncinfer import Engine
from asyncinfer.testing import FakeModel, StepGate


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
def open_engine(gate: StepGate) -> OpenEngine:
    """`async with open_engine(**config)`: an engine whose steps pass `gate`, of the class `kind`.
    Closing checks that nothing was lost."""

    @asynccontextmanager
    async def opened(
        model: FakeModel | None = None, kind: type[Engine] = Engine, **config: Any
    ) -> AsyncIterator[Engine]:
        source = model or FakeModel(gate=gate)
        config.setdefault("drain_timeout", 0.0)
        async with kind(source, **config) as engine:
            try:
                yield engine
            finally:
                gate.open()
        stats = engine.stats()
        assert stats.running == stats.waiting == stats.paused == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert places(engine) == 0
        assert not core_of(engine).requests.live

    return opened
