"""`asyncinfer bench constrained`: what structured output costs, and what it saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio

from asyncinfer import Engine
from asyncinfer.bench.answers import answer_together
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.median import median
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import Figure
from asyncinfer.bench.ticker import ticking

__all__ = ["ConstrainedOptions", "ConstrainedResult", "measure_constrained"]

Options = Mapping[str, Any]

#: JSON in which little has to follow, and which goes on for ever.
_FREE: Final = {"type": "array", "items": {"type": "string"}, "minItems": 1_000_000}
_SHAPE: Final = {
    name: {"enum": ["north", "south", "west", "east"]}
    for name in ("direction_of_travel", "prevailing_wind", "side_of_the_street")
}
#: JSON in which much has to follow.
_FORCED: Final = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": _SHAPE,
        "required": [*_SHAPE],
        "additionalProperties": False,
    },
    "minItems": 1_000_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedOptions:
    """Options of the benchmark."""

    #: A checkpoint's folder or file, a known name or a hub id; None: the shipped model.
    model: str | None = None
    #: Requests decoded together.
    running: int = 32
    #: Tokens of each request.
    tokens: int = 96
    #: New schemas that arrive while event loops are watched.
    schemas: int = 100
    loop: str = "asyncio"
    repeat: int = 5


@dataclass(frozen=True, slots=True)
class ConstrainedTurn:
    """Tokens a second over all requests, in one turn."""

    plain: float
    free: float
    forced: float
    #: Tokens a second of one request alone.
    plain_alone: float
    forced_alone: float

    @property
    def ratio(self) -> float:
        return self.free / self.plain


@dataclass(frozen=True, slots=True)
class ConstrainedResult:
    """Everything measured."""

    #: The turn in the middle, by the ratio of `free` to `plain`.
    turn: ConstrainedTurn
    #: The ratio of `forced` to `plain` in the turn in the middle by that, and of one request alone.
    #: A CPU that is busy with many requests takes as long for a token that is forced.
    forced_ratio: float
    alone_ratio: float
    #: Share of the tokens of `forced_alone` that had to follow.
    forced_share: float
    #: Microseconds of a mask, the mean over all threads' work as it was waited for.
    mask: float
    #: Milliseconds to compile a new schema, one sample for each.
    compile: Quantiles
    #: Milliseconds from the first constrained request to its answer of one token.
    first: float
    #: Lateness of the event loop's tasks in milliseconds, beside plain requests alone and while new
    #: schemas arrive.
    quiet: Quantiles
    arriving: Quantiles

    def figures(self) -> tuple[Figure, ...]:
        turn = self.turn
        added = self.arriving.p99 - self.quiet.p99
        return (
            Figure("unconstrained", turn.plain, "tokens/s", "higher"),
            Figure("constrained / unconstrained", turn.ratio, "x", "higher", 0.9),
            Figure("share of tokens forced", self.forced_share, "", "higher", 0.2),
            Figure("  one request / unconstrained", self.alone_ratio, "x", "higher", 1.0),
            Figure("  all requests / unconstrained", self.forced_ratio, "x", "higher"),
            Figure("a mask", self.mask, "us", "lower"),
            Figure("compile p50", self.compile.p50, "ms", "lower", 5.0),
            Figure("compile p99", self.compile.p99, "ms", "lower"),
            Figure("first constrained request", self.first, "ms", "lower"),
            Figure("loop's lag p99 while schemas arrive, added", added, "ms", "lower", 5.0),
        )


def measure_constrained(
    options: ConstrainedOptions, report: Callable[[str], None] = lambda _: None
) -> ConstrainedResult:
    """Run everything; `report` is told what is going on."""
    return run_on(options.loop, _measure, options, report)


async def _measure(options: ConstrainedOptions, report: Callable[[str], None]) -> ConstrainedResult:
    async with Engine(options.model) as engine:
        began = time.perf_counter()
        await engine.generate("x", choice=["x"], max_tokens=1)
        first = (time.perf_counter() - began) * 1e3
        kinds: list[Options] = [{}, {"json_schema": _FREE}, {"json_schema": _FORCED}]
        for each in kinds:
            report("warm-up")
            await _decode(engine, options, each, options.running)
        before, turns = engine.stats(), []
        forced = asked = 0
        for turn in range(options.repeat):
            report(f"turn {turn + 1} of {options.repeat}")
            speeds = []
            for each, count in [(each, options.running) for each in kinds] + [
                (each, 1) for each in kinds[::2]
            ]:
                at = engine.stats().forced_tokens
                speeds.append(await _decode(engine, options, each, count))
            forced += engine.stats().forced_tokens - at
            asked += options.tokens
            turns.append(ConstrainedTurn(*speeds))
        after = engine.stats()
        report(f"{options.schemas} new schemas")
        compiled = await _compile(engine, options)
        quiet = await _lag(engine, options, 0)
        arriving = await _lag(engine, options, options.schemas)
    masks = after.masks - before.masks
    by_forced = median(turns, lambda turn: turn.forced / turn.plain)
    by_alone = median(turns, lambda turn: turn.forced_alone / turn.plain_alone)
    return ConstrainedResult(
        turn=median(turns, lambda turn: turn.ratio),
        forced_ratio=by_forced.forced / by_forced.plain,
        alone_ratio=by_alone.forced_alone / by_alone.plain_alone,
        forced_share=forced / asked,
        mask=(after.mask_seconds - before.mask_seconds) / masks * 1e6,
        compile=Quantiles.of(compiled),
        first=first,
        quiet=quiet,
        arriving=arriving,
    )


async def _decode(
    engine: Engine, options: ConstrainedOptions, more: Options, requests: int
) -> float:
    """Tokens a second of so many requests together."""
    asked: list[Options] = [
        {"prompt": f"{index}: ", "temperature": 1.0, "seed": index, **more}
        for index in range(requests)
    ]
    seconds, _ = await answer_together(engine, options.tokens, asked)
    return requests * options.tokens / seconds


def new_schema(index: int, salt: str) -> dict[str, Any]:
    """A schema like those of tools, which no other call gives."""
    text = {"type": "string", "maxLength": 40}
    entry = {
        "type": "object",
        "properties": {
            f"name_{index}": text,
            "kind": {"enum": [f"{salt} {i}" for i in range(12)]},
            "amount": {"type": "number", "minimum": 0},
            "day": {"type": "string", "format": "date"},
        },
        "required": [f"name_{index}", "kind"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 1},
            "tags": {"type": "array", "items": text, "maxItems": 5},
            "entries": {"type": "array", "items": entry, "maxItems": 9},
            "note": {"anyOf": [text, {"type": "null"}]},
        },
        "required": ["id", "entries"],
        "additionalProperties": False,
    }


async def _compile(engine: Engine, options: ConstrainedOptions) -> list[float]:
    """Milliseconds to compile each new schema, one after the other."""
    taken = []
    for index in range(options.schemas):
        before = engine.stats().compile_seconds
        await engine.generate("x", json_schema=new_schema(index, "compiled"), max_tokens=1)
        # Published with the next step, at the latest with the end of the request.
        taken.append((engine.stats().compile_seconds - before) * 1e3)
    return taken


async def _lag(engine: Engine, options: ConstrainedOptions, schemas: int) -> Quantiles:
    """The loop's lateness beside a full batch of plain requests, while so many new schemas arrive
    one after the other."""

    async def plain(index: int) -> None:
        await engine.generate(f"{index}: ", max_tokens=2 * options.tokens, ignore_eos=True)

    async def constrained(index: int) -> None:
        schema = new_schema(index, "arriving")
        await engine.generate("x", json_schema=schema, max_tokens=4)

    async with ticking() as ticker:
        async with anyio.create_task_group() as tasks:
            for index in range(options.running):
                tasks.start_soon(plain, index)
            for index in range(schemas):
                tasks.start_soon(constrained, index)
                await anyio.sleep(0.005)
        return Quantiles.of(ticker.late)
