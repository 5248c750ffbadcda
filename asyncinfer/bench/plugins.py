"""`asyncinfer bench plugins`: what plugins cost those who use them, and those who do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from asyncinfer import plugins
from asyncinfer.bench.host_tokens import TokenCost, measure_tokens, staggered_prompt
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.plugin_title import plugin_title
from asyncinfer.bench.record import Figure
from asyncinfer.protocols import Observer, ObserverEvent
from asyncinfer.testing import FakeModel, InlineEngine, SamplerCase, sampler_costs

__all__ = ["PluginOptions", "PluginResult", "measure_plugins"]

#: Cases of `PluginResult.samplers`: a plugin that does what the chain does -> that of the chain.
TWINS = {
    "temperature by a plugin": "temperature",
    "min-p by a plugin": "min-p",
    "drawn by a plugin": "temperature",
}
#: The chain's case that shipped plugins are compared with.
TRUNCATED = "temperature, top-k, top-p"
#: The case of samplers that the user names begins so. It has no target.
YOURS = "your "
#: Cases of rows without a plugin: no request has one, and one request without a row has one.
ALONE, BESIDE = "no plugin", "beside a plugin"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """The work. `vocab_size` is that of the sampling rows."""

    running: int = 256
    steps: int = 200
    rows: int = 64
    vocab_size: int = 32_000
    #: Names with arguments of samplers to measure beside the shipped ones, called in order.
    sampler: Sequence[tuple[str, Mapping[str, Any]]] = ()
    loop: str = "asyncio"
    repeat: int = 3


@dataclass(frozen=True, slots=True)
class PluginResult:
    """Seconds of CPU, by case."""

    #: A step of the inline engine, before any plugin has a name beside the shipped and installed
    #: ones, and with one more in each group; the fake runner's work included.
    steps: Mapping[str, float]
    #: Tokens of an engine with so many observers of each kind.
    observers: Mapping[str, TokenCost]
    #: Figures of `running` rows that the chain alone samples.
    bystanders: Mapping[str, float]
    #: Figures of `rows` rows, by sampler.
    samplers: Mapping[str, float]
    running: int
    rows: int

    def figures(self) -> tuple[Figure, ...]:
        steps, rows = self.steps, self.samplers
        without = self.bystanders[ALONE]
        found = [
            _ratio(
                f"step of {self.running}, plugins registered / not",
                steps["registered"] / steps["none"],
                1.02,
            ),
            _ratio(
                f"sampling {self.running} rows, one more request with a plugin / none",
                self.bystanders[BESIDE] / without,
                1.02,
            ),
        ]
        for case, twin in TWINS.items():
            name = f"{self.rows} rows, {case} / by the chain"
            found.append(_ratio(name, rows[case] / rows[twin], 1.3))
        for case in sorted(rows.keys() - TWINS.keys() - {*TWINS.values(), TRUNCATED}):
            name = f"{self.rows} rows, {case} / {TRUNCATED}"
            target = None if case.startswith(YOURS) else 1.3
            found.append(_ratio(name, rows[case] / rows[TRUNCATED], target))
        none = self.observers["none"].host
        found.append(Figure("host CPU per token without observers", none, "us", "lower"))
        watched = {
            case: cost.host / none for case, cost in self.observers.items() if case != "none"
        }
        found += [_ratio(f"  with {case} / without", value) for case, value in watched.items()]
        return tuple(found)


def _ratio(name: str, value: float, target: float | None = None) -> Figure:
    return Figure(name, value, "x", "lower", target)


def measure_plugins(
    options: PluginOptions, report: Callable[[str], None] = lambda _: None
) -> PluginResult:
    """Run everything; `report` is told what is going on. Registers plugins named `bench-idle`."""
    report(f"steps of {options.running} requests")
    steps = {"none": measure_steps(options.running, options.steps, options.repeat)}
    register_idle()
    steps["registered"] = measure_steps(options.running, options.steps, options.repeat)
    report("observers")
    observers = measure_observers(options)
    report("samplers")
    samplers = sampler_costs(
        sampler_cases(options.sampler),
        rows=options.rows,
        vocab_size=options.vocab_size,
        steps=10 * options.repeat,
    )
    bystanders = sampler_costs(
        bystander_cases(),
        rows=options.running,
        vocab_size=options.vocab_size,
        steps=10 * options.repeat,
    )
    return PluginResult(steps, observers, bystanders, samplers, options.running, options.rows)


def measure_steps(running: int, steps: int, repeat: int) -> float:
    """CPU seconds of this thread for a whole turn of the decode loop: the least of `repeat`
    medians, since what disturbs one only makes it longer."""
    return min(_median_step(running, steps, 20) for _ in range(repeat))


def _median_step(running: int, steps: int, warmup: int) -> float:
    answer = warmup + steps + 2
    model = FakeModel(blocks=running * ((48 + answer) // 16 + 2), strict=False)
    engine = InlineEngine(model, max_running=running, max_step_tokens=64 * running)
    streams = [
        engine.submit(
            staggered_prompt(index),
            max_tokens=answer,
            temperature=0.0,
            ignore_eos=True,
            buffer=answer,
        )
        for index in range(running)
    ]
    engine.pump(warmup)
    spent = []
    for _ in range(steps):
        began = time.thread_time()
        engine.pump()
        spent.append(time.thread_time() - began)
        for stream in streams:
            stream.read()
    assert engine.stats().running == running
    return median(spent)


class Idle(Observer):
    """Is told of everything but steps, and does nothing."""

    def observe(self, event: ObserverEvent) -> None:
        pass


class IdleOfSteps(Idle):
    """Is told of steps too."""

    every_step: ClassVar[bool] = True


def register_idle() -> None:
    """One more plugin in each group, used by nobody."""
    from asyncinfer.bench.plugin_twins import OwnDraw

    for group, factory in {
        "asyncinfer.cache_policies": lambda: plugins.cache_policies.resolve("lru"),
        "asyncinfer.observers": Idle,
        "asyncinfer.samplers": OwnDraw,
        "asyncinfer.schedulers": lambda: plugins.schedulers.resolve("fcfs"),
    }.items():
        plugins.register(group, "bench-idle", factory)


def measure_observers(options: PluginOptions) -> dict[str, TokenCost]:
    """Costs with observers of each kind, in turns: the cheapest run of each."""
    kinds: dict[str, Sequence[type[Observer]]] = {
        "none": (),
        "an observer": (Idle,),
        "an observer of every step": (IdleOfSteps,),
    }
    runs: dict[str, list[TokenCost]] = {name: [] for name in kinds}
    for _ in range(options.repeat):
        for name, kind in kinds.items():
            observers = [observer() for observer in kind]
            runs[name].append(
                run_on(
                    options.loop,
                    measure_tokens,
                    options.running,
                    options.steps,
                    20,
                    None,
                    observers,
                )
            )
    return {name: min(costs, key=lambda cost: cost.host) for name, costs in runs.items()}


def sampler_cases(
    sampler: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> dict[str, SamplerCase]:
    """The chain, twins of it, every plugin that is shipped, and a list of them."""
    from asyncinfer.bench.plugin_twins import MinP, OwnDraw, Temperature

    cases = {
        "temperature": SamplerCase(options={"temperature": 0.8}),
        "min-p": SamplerCase(options={"min_p": 0.05}),
        TRUNCATED: SamplerCase(options={"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
        "temperature by a plugin": SamplerCase(Temperature(0.8)),
        "min-p by a plugin": SamplerCase(MinP(0.05)),
        "drawn by a plugin": SamplerCase(OwnDraw(), {"temperature": 0.8}),
    }
    for info in plugins.samplers.describe():
        if info.origin == "built in":
            factory, _ = plugins.samplers.factory(info.name)
            cases[info.name] = SamplerCase(factory())
    if sampler:
        several = [plugins.samplers.resolve((name, args)) for name, args in sampler]
        cases[YOURS + " ".join(map(plugin_title, sampler))] = SamplerCase(several)
    return cases


def bystander_cases() -> dict[str, SamplerCase]:
    """Rows without a plugin, alone and beside a request that has one."""
    from asyncinfer.bench.plugin_twins import OwnDraw

    return {ALONE: SamplerCase(), BESIDE: SamplerCase(beside=OwnDraw())}
