"""`asyncinfer bench serve`: tokens a second of real models on the CPU, beside other engines'."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import anyio

from asyncinfer import Engine, EngineConfig
from asyncinfer.bench.checkpoint import vocab_size
from asyncinfer.bench.interference import busy_programs, until_quiet
from asyncinfer.bench.llama_gguf import write_llama_gguf
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.peers import PeerError, PeerProcess
from asyncinfer.bench.peers.table import ONE_THREAD
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.serve_options import BESIDE_BUSY, ServeOptions
from asyncinfer.bench.serve_result import Column, Interference, ModelResult, ServeResult
from asyncinfer.bench.serve_run import Run, run_workload
from asyncinfer.bench.ticker import ticking
from asyncinfer.bench.workloads import (
    MAX_RUNNING,
    QUICK,
    RANDOM,
    WORKLOADS,
    Workload,
    model_source,
)
from asyncinfer.machine import usable_cores

__all__ = ["measure_serve"]


def measure_serve(
    options: ServeOptions,
    report: Callable[[str], None] = lambda _: None,
    pythons: Mapping[str, str] = MappingProxyType({}),
) -> ServeResult:
    """Run all measurements; `report` is called with the current one. `pythons`: the interpreter of
    each peer, by its name, if it is not this one."""
    found = []
    with tempfile.TemporaryDirectory(prefix="asyncinfer-bench-") as scratch:
        for model in options.models:
            if model == RANDOM:
                report("writing the random Llama")
            folder = Path(model_source(model, Path(scratch, "random"), quick=options.quick))
            if model == RANDOM and options.quick:
                # A quick run uses a smaller model, which gets a name of its own.
                model = "llama-tiny"
            file = Path(scratch, "model.gguf")
            vocab = vocab_size(folder)
            if "llama.cpp" in options.peers:
                report(f"{model}: writing the GGUF file")
                write_llama_gguf(folder, file, options.dtype)
            report(f"{model}: matrix products")
            products = _product_seconds(folder, options)
            measurement = _Measurement(model, folder, file, vocab, options, pythons, report)
            runs = run_on(options.loop, measurement.run)
            found.append(_model_result(model, options, runs, products))
    return ServeResult(tuple(found))


@dataclass(slots=True)
class _Turns:
    """The results of a workload's repetitions: our runs, and the peers' tokens a second. Beside
    busy programs, `ONE_THREAD` is there too, which is measured without them."""

    runs: list[Run] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Runs:
    alone: dict[str, _Turns] = field(default_factory=dict)
    interference: dict[str, _Turns] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    #: Peers that take no further turns -> why.
    not_measured: dict[str, str] = field(default_factory=dict)
    lag: Quantiles | None = None
    idle_lag: Quantiles | None = None


class _Measurement:
    """The measurement of one model: an engine here, and a process for each peer."""

    def __init__(
        self,
        model: str,
        folder: Path,
        file: Path,
        vocab: int,
        options: ServeOptions,
        pythons: Mapping[str, str],
        report: Callable[[str], None],
    ) -> None:
        self._model = model
        self._folder = folder
        self._file = file
        self._vocab = vocab
        self._options = options
        self._pythons = pythons
        self._report = report

    async def run(self) -> _Runs:
        """Run all turns. A peer's comes right after ours, so that a noisy minute affects both.
        Those beside busy programs come last, since in them peers may take too long."""
        options, found = self._options, _Runs()
        config = EngineConfig(device="cpu", dtype=options.dtype, max_running=MAX_RUNNING)
        async with AsyncExitStack() as stack:
            self._engine = await stack.enter_async_context(Engine(self._folder, config=config))
            self._lost = found.not_measured
            self._peers = [
                await stack.enter_async_context(self._open(name)) for name in options.peers
            ]
            found.versions = {peer.name: peer.version for peer in self._peers}
            self._one_thread: list[PeerProcess] = []
            if options.interference:
                opening = self._open(ONE_THREAD)
                self._one_thread.append(await stack.enter_async_context(opening))
            self._report(f"{self._model}: warm-up")
            for work in (QUICK["sixteen"], QUICK["prefill"]):
                await self._turn(_Turns(), work, -1, [*self._peers, *self._one_thread])
            for repetition, work, peers in self._order(options.workloads):
                turns = found.alone.setdefault(work.name, _Turns())
                await self._turn(turns, work, repetition, peers)
            self._report(f"{self._model}: event-loop lag")
            found.lag, found.idle_lag = await self._lag()
            if options.interference:
                beside_busy = [work for work in options.workloads if work.name in BESIDE_BUSY]
                for repetition, work, peers in self._order(beside_busy, ", beside busy programs"):
                    turns = found.interference.setdefault(work.name, _Turns())
                    number = options.repeat + repetition
                    for peer in self._one_thread:
                        prompts = work.prompts(self._vocab, number)
                        await self._peer_turn(turns, work, prompts, peer, 0)
                    busy_cores = max(1, usable_cores() // 2)
                    with busy_programs(busy_cores):
                        await self._turn(turns, work, number, peers, busy_cores)
        return found

    def _order(
        self, workloads: Sequence[Workload], where: str = ""
    ) -> Iterator[tuple[int, Workload, Sequence[PeerProcess]]]:
        """Repetitions of workloads, and the peers that take a turn in each."""
        options = self._options
        for repetition in range(options.repeat):
            peers = self._peers if repetition < options.peer_repeat else []
            for work in workloads:
                at = f"{work.title} ({repetition + 1} of {options.repeat})"
                self._report(f"{self._model}: {at}{where}")
                yield repetition, work, peers

    def _open(self, name: str) -> AbstractAsyncContextManager[PeerProcess]:
        import torch

        self._report(f"{self._model}: opening {name}")
        longest = max(sum(request) for work in WORKLOADS.values() for request in work.requests)
        return PeerProcess.open(
            name,
            self._pythons.get(name, sys.executable),
            {
                "folder": str(self._folder),
                "gguf": str(self._file),
                "dtype": self._options.dtype,
                "threads": torch.get_num_threads(),
                "running": MAX_RUNNING,
                "context": longest + 16,
            },
            self._options.peer_seconds,
        )

    async def _turn(
        self,
        turns: _Turns,
        work: Workload,
        repetition: int,
        peers: Sequence[PeerProcess],
        busy_cores: int = 0,
    ) -> None:
        """Our turn, then each peer's, beside `busy_cores` cores that other programs keep busy."""
        prompts = work.prompts(self._vocab, repetition)
        await self._rest(busy_cores)
        turns.runs.append(await run_workload(self._engine, work, prompts))
        for peer in peers:
            await self._peer_turn(turns, work, prompts, peer, busy_cores)

    async def _peer_turn(
        self,
        turns: _Turns,
        work: Workload,
        prompts: Sequence[list[int]],
        peer: PeerProcess,
        busy_cores: int,
    ) -> None:
        if peer.name in self._lost:
            return
        await self._rest(busy_cores)
        try:
            seconds = await peer.seconds(work, prompts)
        except PeerError as error:
            # A record is shown to others, and what a process prints names this machine's paths.
            self._lost[peer.name] = f"{work.title}: {error.reason}"
            self._report(f"{self._model}: {error}")
        else:
            turns.peers.setdefault(peer.name, []).append(work.counted / seconds)

    async def _rest(self, busy_cores: int) -> None:
        if not self._options.quick:
            await until_quiet(busy_cores)

    async def _lag(self) -> tuple[Quantiles, Quantiles]:
        """Lateness beside 16 streams, and beside an idle engine, for a second each."""
        options = self._options
        work = (QUICK if options.quick else WORKLOADS)["sixteen"]
        async with ticking() as idle:
            await anyio.sleep(0.1 if options.quick else 1.0)
        async with ticking() as busy:
            for repetition in range(options.repeat):
                # New prompts, of which nothing is cached.
                prompts = work.prompts(self._vocab, 1000 + repetition)
                await run_workload(self._engine, work, prompts)
        return Quantiles.of(busy.late), Quantiles.of(idle.late)


def _product_seconds(folder: Path, options: ServeOptions) -> dict[int, float]:
    """`product_seconds` in a process of its own, whose threads end with it."""
    from asyncinfer.bench.products import BULK_ROWS, product_rows, product_seconds

    rows = sorted({BULK_ROWS, *map(product_rows, options.workloads)})
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(product_seconds, folder, rows, options.dtype).result()


def _model_result(
    model: str, options: ServeOptions, runs: _Runs, products: dict[int, float]
) -> ModelResult:
    from asyncinfer.bench.products import floor_seconds

    assert runs.lag is not None
    assert runs.idle_lag is not None
    columns = tuple(
        _column(
            work,
            runs.alone[work.name],
            runs.interference.get(work.name),
            work.counted / floor_seconds(work, products),
        )
        for work in options.workloads
    )
    return ModelResult(model, columns, runs.versions, runs.not_measured, runs.lag, runs.idle_lag)


def _column(work: Workload, alone: _Turns, beside: _Turns | None, ceiling: float) -> Column:
    gaps = [gap for run in alone.runs for gap in run.itl]
    interference = None
    if beside is not None:
        peers = _peer_rates(beside)
        one_thread = peers.pop(ONE_THREAD, ())
        interference = Interference(_rates(work, beside), peers, one_thread)
    return Column(
        name=work.name,
        title=work.title,
        rates=_rates(work, alone),
        peer_rates=_peer_rates(alone),
        interference=interference,
        ttft=Quantiles.of(ttft for run in alone.runs for ttft in run.ttft),
        itl=Quantiles.of(gaps) if gaps else None,
        cached_tokens=alone.runs[0].cached_tokens,
        ceiling=ceiling,
    )


def _peer_rates(turns: _Turns) -> dict[str, tuple[float, ...]]:
    return {name: tuple(rates) for name, rates in turns.peers.items()}


def _rates(work: Workload, turns: _Turns) -> tuple[float, ...]:
    return tuple(work.counted / run.seconds for run in turns.runs)
