"""vLLM's asynchronous engine on a CPU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncinfer.bench.peers.worker import Setup

__all__ = ["open_peer"]


def open_peer(setup: Setup) -> VllmPeer:
    """See `worker.Peer`."""
    cores = sorted(os.sched_getaffinity(0))[: setup["threads"]]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    return VllmPeer(setup)


class VllmPeer:
    """`AsyncLLM`, whose core and worker have processes of their own."""

    def __init__(self, setup: Setup) -> None:
        from vllm import __version__

        self.version = __version__
        self._loop = asyncio.new_event_loop()
        self._engine: Any = self._loop.run_until_complete(self._open(setup))
        self._count = 0

    async def _open(self, setup: Setup) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=setup["folder"],
                dtype=setup["dtype"],
                max_num_seqs=setup["running"],
                max_model_len=setup["context"],
                enable_prefix_caching=True,
                disable_log_stats=True,
            )
        )

    def warm(self, prefix: list[int]) -> None:
        """The prefix cache keeps whatever was computed."""
        self.run([(prefix, 1)], 0)

    def run(self, requests: Sequence[tuple[list[int], int]], shared: int) -> list[list[int]]:
        """See `worker.Peer`."""

        async def together() -> list[list[int]]:
            return await asyncio.gather(*(self._answer(*request) for request in requests))

        return self._loop.run_until_complete(together())

    async def _answer(self, prompt: list[int], tokens: int) -> list[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._count += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        found: list[int] = []
        asked = {"prompt_token_ids": prompt}
        async for part in self._engine.generate(asked, params, str(self._count)):
            found += part.outputs[0].token_ids
        return found
