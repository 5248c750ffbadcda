"""`asyncinfer bench lag`: how much later an event loop runs its tasks because an engine is busy
in the same process."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import anyio

from asyncinfer import Engine, InvalidRequest, SamplingParams
from asyncinfer.bench.gates import Phase
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.median import median
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import BenchError, Figure
from asyncinfer.bench.ticker import ticking
from asyncinfer.bench.workloads import SHIPPED
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.testing import FakeModel, Step, Tokenizer

__all__ = ["FAKE_MODELS", "Lag", "LagOptions", "LagResult", "measure_lag"]

#: The fake model, with a token per byte and with the shipped model's tokenizer.
FAKE_MODELS = ("fake-bytes", "fake-bpe")

WORDS = 4096
#: Seconds beyond the measured time that the first long prompt may take.
LONGEST_WAIT = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LagOptions:
    """Options of the benchmark."""

    #: `FAKE_MODELS`, or `SHIPPED`, folders and hub ids of real ones.
    models: Sequence[str] = FAKE_MODELS
    loop: str = "asyncio"
    streams: int = 64
    prompt_bytes: int = 1_000_000
    #: Clients that send such prompts, each the next one when the last was answered or refused.
    senders: int = 2
    #: Seconds of the idle phase, and of the busy one.
    seconds: float = 10.0
    #: Least milliseconds of a step of the fake model.
    step_ms: float = 5.0
    repeat: int = 3
    #: Call `gc.freeze` once the engine is open, as a host may: the garbage collector then skips
    #: what exists by then (torch alone is 150,000 objects).
    freeze: bool = False


@dataclass(frozen=True, slots=True)
class Lag:
    """By how many milliseconds a task ran late that had slept one."""

    model: str
    idle: Quantiles
    busy: Quantiles
    #: Objects the garbage collector looks at in a full collection, before the busy phase.
    objects: int
    #: Tokens the streams got meanwhile.
    tokens: int
    #: Long prompts answered with a token, and refused for their length, meanwhile.
    prompts: int
    refused: int

    @property
    def taken(self) -> int:
        return self.prompts + self.refused

    @property
    def added_p50(self) -> float:
        return self.busy.p50 - self.idle.p50

    @property
    def added_p99(self) -> float:
        return self.busy.p99 - self.idle.p99

    @property
    def added_max(self) -> float:
        return self.busy.max - self.idle.max


@dataclass(frozen=True, slots=True)
class LagResult:
    """The median repetition by p99, model by model."""

    models: tuple[Lag, ...]

    def figures(self) -> tuple[Figure, ...]:
        found: list[Figure] = []
        for lag in self.models:
            found += [
                Figure(f"added lag p50 [{lag.model}]", lag.added_p50, "ms", "lower"),
                Figure(f"added lag p99 [{lag.model}]", lag.added_p99, "ms", "lower", 5.0),
                Figure(f"added lag max [{lag.model}]", lag.added_max, "ms", "lower", 50.0),
                Figure(f"lag p99, engine idle [{lag.model}]", lag.idle.p99, "ms", "lower"),
                Figure(f"long prompts meanwhile [{lag.model}]", lag.taken, "", "higher"),
            ]
        return tuple(found)


def measure_lag(options: LagOptions, report: Callable[[str], None] = lambda _: None) -> LagResult:
    """Run everything; `report` is told what is going on."""
    found = []
    for model in options.models:
        report(f"event-loop lag beside {model}")
        runs = [run_on(options.loop, _measure, model, options) for _ in range(options.repeat)]
        found.append(median(runs, lambda lag: lag.added_p99))
    return LagResult(tuple(found))


async def _measure(model: str, options: LagOptions) -> Lag:
    work = _LagWork(options)
    source, config = _source(model, options)
    async with Engine(source, **config) as engine:
        # A worker thread of an earlier repetition may still tokenise a long prompt.
        await anyio.sleep(min(1.0, options.seconds))
        gc.collect()
        # Objects that the caller froze stay frozen.
        ours = options.freeze and gc.get_freeze_count() == 0
        if options.freeze:
            gc.freeze()
        objects = len(gc.get_objects())
        async with ticking() as idle:
            await anyio.sleep(options.seconds)
        async with anyio.create_task_group() as tasks:
            for index in range(options.streams):
                tasks.start_soon(work.decode, engine, index)
            with anyio.fail_after(60):
                await work.all_began.wait()
            before = work.tokens
            for index in range(options.senders):
                tasks.start_soon(work.send, engine, index)
            async with ticking() as busy:
                await anyio.sleep(options.seconds)
                with anyio.move_on_after(LONGEST_WAIT):
                    # On a slow machine the first long prompt may take longer.
                    await work.taken.wait()
            tokens = work.tokens - before
            tasks.cancel_scope.cancel()
    if not tokens or not work.prompts + work.refused:
        raise BenchError(
            f"{model}: {tokens} tokens and {work.prompts + work.refused} long prompts in "
            f"{options.seconds:g} s: nothing was going on"
        )
    if ours:
        gc.unfreeze()
    return Lag(
        model=model,
        idle=Quantiles.of(idle.late),
        busy=Quantiles.of(busy.late),
        objects=objects,
        tokens=tokens,
        prompts=work.prompts,
        refused=work.refused,
    )


class _LagWork:
    """What the engine does while its host's lag is measured."""

    def __init__(self, options: LagOptions) -> None:
        self.tokens = 0
        self.prompts = 0
        self.refused = 0
        self.all_began = anyio.Event()
        #: Set when a long prompt has been answered or refused.
        self.taken = anyio.Event()
        self._options = options
        self._missing = options.streams
        self._random = random.Random(1)
        self._words = [self._word() for _ in range(WORDS)]
        self._text = " ".join(self._random.choices(self._words, k=options.prompt_bytes // 3))

    async def decode(self, engine: Engine, index: int) -> None:
        """Read streams without end. Where a real model's context ends one, another follows."""
        began = False
        params = SamplingParams(temperature=1.0, seed=index, ignore_eos=True)
        while True:
            prompt = f"# {index}\ndef {self._random.choice(self._words)}("
            async with engine.stream(prompt, params=params) as stream:
                async for chunk in stream:
                    self.tokens += len(chunk.token_ids)
                    if not began:
                        began = True
                        self._missing -= 1
                        if not self._missing:
                            self.all_began.set()

    async def send(self, engine: Engine, index: int) -> None:
        """Send one long prompt after the other."""
        for number in count():
            # The first block differs, so that nothing is cached. The rest is one long text, so that
            # making a prompt takes no time.
            prompt = f"{index} {number} {self._text}"[: self._options.prompt_bytes]
            try:
                async with engine.stream(prompt, max_tokens=1, temperature=0.0) as stream:
                    async for _ in stream:
                        self.prompts += 1
            except InvalidRequest:
                # The prompt is longer than a real model's context: known once it is tokenised.
                self.refused += 1
            self.taken.set()

    def _word(self) -> str:
        return "".join(self._random.choices("etaoinshrdlu", k=self._random.randint(2, 9)))


def _source(model: str, options: LagOptions) -> tuple[Any, dict[str, Any]]:
    config = {
        "max_running": options.streams + options.senders,
        "max_prompt_chars": options.prompt_bytes,
        "drain_timeout": 0.0,
    }
    if model == SHIPPED:
        return MODEL_PATH, config
    if model not in FAKE_MODELS:
        return (Path(model) if Path(model).exists() else model), config
    tokenizer = Tokenizer.from_folder(MODEL_PATH) if model == "fake-bpe" else None
    context = options.prompt_bytes + 32
    blocks = (options.senders + 1) * (context // 16 + 1) + options.streams * 1024
    step = options.step_ms / 1e3

    def gate(phase: Phase, plan: Step) -> None:
        # The decode thread waits without the GIL, as it does for a device.
        if phase == "collect":
            time.sleep(step)

    return FakeModel(
        blocks=blocks, max_context=context, strict=False, gate=gate, tokenizer=tokenizer
    ), config
