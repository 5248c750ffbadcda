"""`asyncinfer bench serve`: tokens a second of real models on the CPU, beside the peer's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import anyio

from asyncinfer import Engine, EngineConfig
from asyncinfer.bench.checkpoint import write_checkpoint
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError, Figure
from asyncinfer.bench.serve_run import Run, run_workload
from asyncinfer.bench.shapes import LLAMA_125M, LLAMA_TINY
from asyncinfer.bench.ticker import ticking
from asyncinfer.bench.workloads import (
    MAX_RUNNING,
    QUICK,
    RANDOM,
    SHIPPED,
    VLLM_CPU,
    WORKLOADS,
    Workload,
)
from asyncinfer.builtin import MODEL_PATH

__all__ = [
    "Column",
    "ModelResult",
    "ServeOptions",
    "ServeResult",
    "measure_serve",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the benchmark."""

    #: `SHIPPED`, `RANDOM` or folders of Llama-architecture checkpoints.
    models: Sequence[str] = (SHIPPED, RANDOM)
    columns: Sequence[str] = tuple(WORKLOADS)
    peer: bool = True
    #: Medians over so many repetitions, after a warm-up.
    repeat: int = 3
    #: Repetitions in which the peer takes a turn, at most.
    peer_repeat: int = 3
    #: A smoke run: small work on a small model; its figures mean nothing.
    quick: bool = False
    loop: str = "asyncio"

    @property
    def workloads(self) -> list[Workload]:
        table = QUICK if self.quick else WORKLOADS
        return [table[name] for name in self.columns]


@dataclass(frozen=True, slots=True)
class Column:
    """One workload on one model. Rates in tokens a second, in the order of the repetitions."""

    name: str
    title: str
    rates: tuple[float, ...]
    peer_rates: tuple[float, ...]
    #: Milliseconds of all repetitions.
    ttft: Quantiles
    itl: Quantiles | None
    #: Prompt tokens taken from the prefix cache, per repetition.
    cached_tokens: int
    #: The rate of `VLLM_CPU`, where it is known for this model and this work.
    goal: float | None
    #: Tokens a second if nothing but the model's matrix products took time, on this machine.
    ceiling: float

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def peer_ratio(self) -> float | None:
        return self.rate / median(self.peer_rates) if self.peer_rates else None


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model."""

    model: str
    columns: tuple[Column, ...]
    #: Milliseconds of lateness of a task that slept one, beside 16 streams and beside none.
    lag: Quantiles
    idle_lag: Quantiles

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, slots=True)
class ServeResult:
    """All models."""

    models: tuple[ModelResult, ...]

    def figures(self) -> tuple[Figure, ...]:
        return tuple(figure for result in self.models for figure in self._of(result))

    def _of(self, result: ModelResult) -> list[Figure]:
        model = result.model
        found = []
        for column in result.columns:
            title = f"{model}: {column.title}"
            found.append(Figure(title, column.rate, "tokens/s", "higher", column.goal))
            if column.peer_ratio is not None:
                found.append(
                    Figure(f"{title}, over the peer", column.peer_ratio, "x", "higher", 1.0)
                )
            share = 100 * column.rate / column.ceiling
            found.append(Figure(f"{title}, share of the products alone", share, "%", "higher"))
            found.append(Figure(f"{title}, TTFT p50", column.ttft.p50, "ms", "lower"))
            if column.itl is not None:
                found.append(Figure(f"{title}, ITL p50", column.itl.p50, "ms", "lower"))
                found.append(Figure(f"{title}, ITL p99", column.itl.p99, "ms", "lower"))
        one, sixteen = result.column("one"), result.column("sixteen")
        if one and sixteen:
            ratio = sixteen.rate / one.rate
            found.append(Figure(f"{model}: 16 at once over 1", ratio, "x", "higher", 5.0))
        found.append(Figure(f"{model}: event-loop lag p99", result.lag.p99, "ms", "lower", 5.0))
        return found


def measure_serve(
    options: ServeOptions, report: Callable[[str], None] = lambda _: None
) -> ServeResult:
    """Run everything; `report` is told what is going on."""
    found = []
    with tempfile.TemporaryDirectory(prefix="asyncinfer-bench-") as scratch:
        for model in options.models:
            folder = Path(model)
            if model == SHIPPED:
                folder = MODEL_PATH
            elif model == RANDOM:
                folder = Path(scratch)
                report("writing the random Llama")
                write_checkpoint(LLAMA_TINY if options.quick else LLAMA_125M, folder)
                # A quick run uses a smaller model, which gets a name of its own.
                model = "llama-tiny" if options.quick else RANDOM
            found.append(run_on(options.loop, _measure_model, model, folder, options, report))
    return ServeResult(tuple(found))


async def _measure_model(
    model: str, folder: Path, options: ServeOptions, report: Callable[[str], None]
) -> ModelResult:
    from asyncinfer.bench.peer import require_transformers
    from asyncinfer.bench.products import BULK_ROWS, floor_seconds, product_rows
    from asyncinfer.bench.worker_process import WorkerProcess

    vocab = _vocab_size(folder)
    if options.peer:
        require_transformers()
    runs: Mapping[str, list[Run]] = {work.name: [] for work in options.workloads}
    peer_rates: Mapping[str, list[float]] = {work.name: [] for work in options.workloads}
    config = EngineConfig(device="cpu", dtype="float32", max_running=MAX_RUNNING)
    rows = {BULK_ROWS, *map(product_rows, options.workloads)}
    async with Engine(folder, config=config) as engine:
        with WorkerProcess.open() as worker:
            report(f"{model}: matrix products")
            products = await worker.product_seconds(folder, sorted(rows))
            report(f"{model}: warm-up")
            for work in (QUICK["sixteen"], QUICK["prefill"]):
                prompts = work.prompts(vocab, -1)
                await run_workload(engine, work, prompts)
                if options.peer:
                    await worker.peer_seconds(folder, work, prompts)
            for repetition in range(options.repeat):
                # The peer's turn comes right after ours, so that a noisy minute hits both.
                for work in options.workloads:
                    report(f"{model}: {work.title} ({repetition + 1} of {options.repeat})")
                    prompts = work.prompts(vocab, repetition)
                    runs[work.name].append(await run_workload(engine, work, prompts))
                    if options.peer and repetition < options.peer_repeat:
                        seconds = await worker.peer_seconds(folder, work, prompts)
                        peer_rates[work.name].append(work.counted / seconds)
        report(f"{model}: event-loop lag")
        lag, idle_lag = await _lag(engine, vocab, options)
    goals = VLLM_CPU if model == RANDOM else {}
    columns = tuple(
        _column(
            work,
            runs[work.name],
            peer_rates[work.name],
            goals.get(work.name),
            work.counted / floor_seconds(work, products),
        )
        for work in options.workloads
    )
    return ModelResult(model, columns, lag, idle_lag)


async def _lag(engine: Engine, vocab: int, options: ServeOptions) -> tuple[Quantiles, Quantiles]:
    """Lateness beside 16 streams, and beside an idle engine for a second."""
    work = (QUICK if options.quick else WORKLOADS)["sixteen"]
    async with ticking() as idle:
        await anyio.sleep(0.1 if options.quick else 1.0)
    async with ticking() as busy:
        for repetition in range(options.repeat):
            # New prompts, so that nothing is cached.
            prompts = work.prompts(vocab, 1000 + repetition)
            await run_workload(engine, work, prompts)
    return Quantiles.of(busy.late), Quantiles.of(idle.late)


def _column(
    work: Workload,
    runs: Sequence[Run],
    peer_rates: Sequence[float],
    goal: float | None,
    ceiling: float,
) -> Column:
    gaps = [gap for run in runs for gap in run.itl]
    return Column(
        name=work.name,
        title=work.title,
        rates=tuple(work.counted / run.seconds for run in runs),
        peer_rates=tuple(peer_rates),
        ttft=Quantiles.of(ttft for run in runs for ttft in run.ttft),
        itl=Quantiles.of(gaps) if gaps else None,
        cached_tokens=runs[0].cached_tokens,
        goal=goal,
        ceiling=ceiling,
    )


def _vocab_size(folder: Path) -> int:
    path = folder / "config.json"
    try:
        return int(json.loads(path.read_text("utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: no checkpoint with a vocab_size: {error!r}") from error
