"""Many requests at once on a checkpoint: this engine, and the peers that are installed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from asyncinfer import Engine, EngineConfig, SamplingParams
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.record import BenchError, Figure
from benchmarks.gpu_peers import PeerWork, importable_peers, run_peer

__all__ = ["BurstResult", "burst_work", "measure_burst"]

#: The least that this engine's rate has to be over a peer's.
TARGETS = {"mini-sglang": 1.0, "transformers continuous batching": 5.0}
#: It pads all requests into one batch, so it gets the first few only, and so does this engine for
#: the comparison.
STATIC = "transformers static cache"
STATIC_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class BurstResult:
    """Rates in output tokens a second, each over the same requests as the peer's."""

    requests: int
    #: What this engine did with all of them, and with the first few.
    rate: float
    few_rate: float
    peers: dict[str, float] = field(default_factory=dict)
    #: Why a peer has no rate.
    failed: dict[str, str] = field(default_factory=dict)

    def figures(self, *, targets: bool) -> tuple[Figure, ...]:
        found = [Figure(f"{self.requests} requests at once", self.rate, "tokens/s", "higher")]
        for peer, rate in self.peers.items():
            ours = self.few_rate if peer == STATIC else self.rate
            target = TARGETS.get(peer) if targets else None
            found.append(Figure(f"{peer}, the same work", rate, "tokens/s", "higher"))
            found.append(Figure(f"over {peer}", ours / rate, "x", "higher", target))
        return tuple(found)


def burst_work(
    folder: Path, vocab: int, device: str, count: int, least: int, most: int
) -> PeerWork:
    """`count` requests with prompts and outputs of `least` to `most` tokens, evenly drawn."""
    draw = random.Random(20_261_120)
    prompts = [draw.choices(range(vocab - 2), k=draw.randint(least, most)) for _ in range(count)]
    return PeerWork(folder, prompts, [draw.randint(least, most) for _ in prompts], device)


def measure_burst(
    work: PeerWork,
    report: Callable[[str], None],
    *,
    seconds_left: Callable[[], float],
    save: Callable[[BurstResult], None] = lambda _: None,
    peer_seconds: float = 120.0,
) -> BurstResult:
    """This engine, then each peer, as long as there is time for it. `save` is handed what there is
    before each peer: one that takes the machine down takes nothing else along."""
    report(f"{len(work.prompts)} requests at once")
    seconds, few_seconds = run_on("asyncio", _ours, work, seconds_left())
    result = BurstResult(
        requests=len(work.prompts),
        rate=sum(work.outputs) / seconds,
        few_rate=sum(work.outputs[:STATIC_REQUESTS]) / few_seconds,
    )
    for peer in importable_peers():
        timeout = min(peer_seconds, seconds_left())
        if timeout < 5.0:
            result.failed[peer] = "no time left"
            continue
        save(result)
        report(f"{peer}: {len(work.prompts)} requests")
        given = _first(work) if peer == STATIC else work
        try:
            result.peers[peer] = sum(given.outputs) / run_peer(peer, given, timeout)
        except BenchError as error:
            result.failed[peer] = str(error)
    return result


def _first(work: PeerWork) -> PeerWork:
    few = slice(STATIC_REQUESTS)
    return PeerWork(work.folder, work.prompts[few], work.outputs[few], work.device)


async def _ours(work: PeerWork, timeout: float) -> tuple[float, float]:
    try:
        with anyio.fail_after(max(timeout, 0.0)):
            return await _measured(work)
    except TimeoutError:
        raise BenchError(f"{len(work.prompts)} requests: not done in {timeout:.0f} s") from None


async def _measured(work: PeerWork) -> tuple[float, float]:
    config = EngineConfig(
        device=work.device, max_running=len(work.prompts), max_context=work.longest + 16
    )
    async with Engine(work.folder, config=config) as engine:
        # Loads kernels and records graphs of the sizes to come. Not the work's own tokens, which
        # would then be cached.
        other = [[token + 1 for token in prompt] for prompt in work.prompts]
        await _burst(engine, other, [min(n, 64) for n in work.outputs])
        seconds = await _burst(engine, work.prompts, work.outputs)
        few = _first(work)
        reversed_prompts = [prompt[::-1] for prompt in few.prompts]
        return seconds, await _burst(engine, reversed_prompts, few.outputs)


async def _burst(engine: Engine, prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> float:
    async def consume(prompt: Sequence[int], output: int) -> None:
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        done = await engine.generate(list(prompt), params=params)
        if done.usage.completion_tokens != output:
            raise BenchError(f"gave {done.usage.completion_tokens} of {output} tokens")

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for prompt, output in zip(prompts, outputs, strict=True):
            tasks.start_soon(consume, prompt, output)
    return time.perf_counter() - began
