"""This package's own engine on one thread: beside busy programs it should stay nearly as fast."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncinfer import Engine, EngineConfig, SamplingParams, __version__

if TYPE_CHECKING:
    from asyncinfer.bench.peers.worker import Setup

__all__ = ["open_peer"]


def open_peer(setup: Setup) -> OneThread:
    """See `worker.Peer`."""
    return OneThread(setup)


class OneThread:
    """An engine that is open until its process ends."""

    version = __version__

    def __init__(self, setup: Setup) -> None:
        config = EngineConfig(
            device="cpu", dtype=setup["dtype"], max_running=setup["running"], cpu_threads=1
        )
        self._loop = asyncio.new_event_loop()
        self._engine = self._loop.run_until_complete(
            Engine.open(Path(setup["folder"]), config=config)
        )

    def warm(self, prefix: list[int]) -> None:
        """The prefix cache keeps whatever was computed."""
        self.run([([*prefix, prefix[0]], 1)], 0)

    def run(self, requests: Sequence[tuple[list[int], int]], shared: int) -> list[list[int]]:
        """See `worker.Peer`."""

        async def answer(prompt: list[int], tokens: int) -> list[int]:
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            return list((await self._engine.generate(prompt, params=params)).token_ids)

        async def together() -> list[list[int]]:
            return await asyncio.gather(*(answer(*request) for request in requests))

        return self._loop.run_until_complete(together())
