"""An error after which a device can no longer be used ends its engine, and is not tried again."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

from asyncinfer import Engine, EngineDead
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.models import Decoder
from asyncinfer.testing import FakeModel

pytestmark = pytest.mark.anyio

STICKY = "CUDA error: an illegal memory access was encountered"


# fault 25
@pytest.mark.parametrize("phase", ["launch", "collect"])
async def test_every_stream_is_told_and_nothing_is_launched_again(phase: str) -> None:
    calls: list[str] = []

    def break_down(at: str, plan: Any) -> None:
        calls.append(at)
        if at == phase and calls.count(at) == 3:
            raise RuntimeError(STICKY)

    engine = await Engine.open(FakeModel(gate=break_down))
    told: list[EngineDead] = []

    async def consume(index: int) -> None:
        with pytest.raises(EngineDead, match="illegal memory access") as caught:
            await engine.generate(f"request {index}", max_tokens=100)
        told.append(caught.value)

    async with anyio.create_task_group() as tasks:
        for index in range(4):
            tasks.start_soon(consume, index)
    assert [str(error.__cause__) for error in told] == [STICKY] * 4
    after = len(calls)
    for _ in range(3):
        with pytest.raises(EngineDead, match="illegal memory access"):
            engine.stream("again")
    await engine.aclose()
    assert len(calls) == after, "the device was used again"
    # It was that engine's alone: another one opens in the same process.
    async with Engine(FakeModel()) as other:
        assert (await other.generate("x", max_tokens=2)).usage.completion_tokens == 2


# fault 25
async def test_it_is_no_lack_of_memory_to_the_real_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lack of memory is met by smaller steps; this is not."""
    passes = 0

    def break_down(*_: object) -> torch.Tensor:
        nonlocal passes
        passes += 1
        raise RuntimeError(STICKY)

    engine = await Engine.open(MODEL_PATH, device="cpu", kv_bytes=1 << 22, drain_timeout=0.0)
    monkeypatch.setattr(Decoder, "forward", break_down)
    with pytest.raises(EngineDead, match="illegal memory access"):
        await engine.generate("def add(a, b):", max_tokens=4)
    assert passes == 1
    await engine.aclose()
