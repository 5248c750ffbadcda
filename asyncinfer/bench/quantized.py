"""`asyncinfer bench quantized`: a GGUF file packed, as floats, and in llama.cpp, in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from asyncinfer import Engine
from asyncinfer.bench.answers import answer_together
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.peers.llama_cpp import LlamaPeer, has_llama
from asyncinfer.bench.record import BenchError, Figure

__all__ = ["QuantizedOptions", "QuantizedResult", "QuantizedRow", "measure_quantized"]

_OURS: Final = {"packed": "plain", "floats": "floats"}
_PEER: Final = "llama.cpp"
_SEED: Final = 13
_MOST_AT_ONCE: Final = 64
#: Prompts are of token ids below, which every vocabulary has.
_TOKENS: Final = 128
#: Bytes that are read to measure the memory's bandwidth: more than caches hold.
_READ_BYTES: Final = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedOptions:
    """Options of the benchmark."""

    #: A GGUF file; None: `smollm2`, which is fetched if it is not there.
    model: str | None = None
    #: Tokens of a prompt and of an answer where several requests run.
    prompt: int = 32
    tokens: int = 64
    #: Tokens of the prompt that prefill is measured with.
    prefill: int = 512
    #: Threads of every engine; None: torch's number.
    threads: int | None = None
    repeat: int = 3
    no_peer: bool = False
    #: A smoke run.
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRow:
    """One engine at one kind of work: the fastest run."""

    engine: str
    #: "1 request", "16 requests", "64 requests" or "prefill".
    work: str
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class QuantizedResult:
    """Everything measured."""

    #: Bytes a second that all threads together read.
    bandwidth: float
    #: Bytes of the file's tensors, about: the whole file.
    file_bytes: int
    rows: tuple[QuantizedRow, ...]

    def figures(self) -> tuple[Figure, ...]:
        found = []
        for row in self.rows:
            name = f"{row.work}, {row.engine}"
            found.append(Figure(name, row.tokens_per_second, "tokens/s", "higher"))
            if row.work == "1 request" and row.engine != "floats":
                share = 100 * row.tokens_per_second * self.file_bytes / self.bandwidth
                found.append(Figure(f"{name}: of the bandwidth", share, "%", "higher"))
        speeds = {(row.engine, row.work): row.tokens_per_second for row in self.rows}
        for work in dict.fromkeys(row.work for row in self.rows):
            for other in ("floats", _PEER):
                if (other, work) in speeds:
                    ratio = speeds["packed", work] / speeds[other, work]
                    name = f"{work}: packed over {other}"
                    found.append(Figure(name, ratio, "x", "higher", _TARGETS.get((work, other))))
        return tuple(found)


#: Targets: tokens a second with packed products, over another engine's.
_TARGETS: Final = {
    ("1 request", "floats"): 2.0,
    ("1 request", _PEER): 0.9,
    ("16 requests", _PEER): 1.5,
}


def measure_quantized(
    options: QuantizedOptions, report: Callable[[str], None] = lambda line: None
) -> QuantizedResult:
    """Tokens a second of each engine at each kind of work, in turns within one process. llama.cpp
    is left out where it is not installed. Raises `BenchError`."""
    if options.quick:
        options = replace(options, prompt=4, tokens=4, prefill=16, repeat=1)
    import torch

    path = _file(options.model)
    threads = options.threads or torch.get_num_threads()
    peer = not options.no_peer and has_llama()
    if not peer and not options.no_peer:
        report("llama.cpp is left out: pip install llama-cpp-python")
    runs = run_on("asyncio", _runs, options, path, threads, peer, report)
    best: dict[tuple[str, str], float] = {}
    for row in runs:
        key = row.work, row.engine
        best[key] = max(best.get(key, 0.0), row.tokens_per_second)
    rows = tuple(
        QuantizedRow(engine=engine, work=work, tokens_per_second=speed)
        for (work, engine), speed in best.items()
    )
    return QuantizedResult(_bandwidth(threads), path.stat().st_size, rows)


async def _runs(
    options: QuantizedOptions,
    path: Path,
    threads: int,
    peer: bool,
    report: Callable[[str], None],
) -> list[QuantizedRow]:
    context = max(options.prefill + 1, options.prompt + options.tokens) + 1
    draw = random.Random(_SEED)
    found = []
    async with AsyncExitStack() as stack:
        engines = {}
        for name, weights in _OURS.items():
            report(f"opening: {name}")
            engines[name] = await stack.enter_async_context(
                Engine(
                    path,
                    device="cpu",
                    weights=weights,
                    cpu_threads=threads,
                    max_context=context,
                    max_running=_MOST_AT_ONCE,
                    prefix_cache=False,
                )
            )
        llama = None
        if peer:
            report(f"opening: {_PEER}")
            llama = stack.enter_context(
                closing(LlamaPeer(path, threads=threads, context=context, requests=_MOST_AT_ONCE))
            )
        for turn in range(options.repeat + 1):
            for work, count, prompt, tokens in (
                ("1 request", 1, options.prompt, options.tokens),
                ("16 requests", 16, options.prompt, options.tokens),
                ("64 requests", 64, options.prompt, options.tokens),
                ("prefill", 1, options.prefill, 1),
            ):
                prompts = [
                    [draw.randrange(3, _TOKENS) for _ in range(prompt)] for _ in range(count)
                ]
                for name in (*engines, *([_PEER] if llama else [])):
                    began = time.perf_counter()
                    if name == _PEER:
                        assert llama is not None
                        llama.generate(prompts, tokens)
                    else:
                        asked = [{"prompt": one, "temperature": 0.0} for one in prompts]
                        await answer_together(engines[name], tokens, asked)
                    seconds = time.perf_counter() - began
                    done = prompt if work == "prefill" else count * tokens
                    # The first turn only warms up.
                    if turn:
                        speed = done / seconds
                        report(f"{work}: {name} {speed:.1f} tokens/s")
                        found.append(QuantizedRow(engine=name, work=work, tokens_per_second=speed))
    return found


def _file(model: str | None) -> Path:
    if model is None:
        from asyncinfer.models import NAMED_MODELS, pull

        return pull(NAMED_MODELS["smollm2"])
    path = Path(model)
    if path.suffix.lower() != ".gguf" or not path.is_file():
        raise BenchError(f"model={model!r}: must be a GGUF file")
    return path


def _bandwidth(threads: int) -> float:
    """Bytes a second of the fastest of five reads of a large tensor."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.ones(_READ_BYTES // 4)
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            data.sum()
            seconds.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return data.nbytes / min(seconds)
