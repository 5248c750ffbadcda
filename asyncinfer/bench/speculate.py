"""`asyncinfer bench speculate`: what guessed tokens save, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncinfer import Completion, Engine
from asyncinfer.bench.answers import answer_together
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.median import median
from asyncinfer.bench.record import Figure

__all__ = ["SpeculateOptions", "SpeculateResult", "measure_speculate"]

#: A file that a model copies when it has seen it before.
_FILE: Final = '''
class Account:
    """Money of one customer, in cents."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be above zero")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("there is not so much money")
        self.balance = self.balance - amount
        return self.balance
'''
_COPIED: Final = _FILE + "\n\n# The same again:\n" + _FILE + "\n\n# The same again:\n"
#: The caller's prediction: the file before an edit, which differs in four places.
_EXPECTED: Final = _FILE.replace("amount", "value", 2).replace("self.balance", "self.total", 2)
_COPY: Final[dict[str, Any]] = {"prompt": _COPIED, "temperature": 0.0}
_HINT: Final[dict[str, Any]] = {"prediction": _EXPECTED}
#: A text that continues without repeating itself, drawn at temperature 1.
_TOLD: Final = "The old harbour master opened his diary and began to write about the storm. "
#: Such texts in a turn, each with its own seed.
_TEXTS: Final = 3
#: The most tokens of each answer of the warm-up.
_WARMING: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculateOptions:
    """Options of the benchmark."""

    #: A checkpoint's folder, hub id or known name; None: the shipped model.
    model: str | None = None
    #: Tokens of each answer.
    tokens: int = 160
    #: Requests decoded together, beside one alone.
    running: int = 16
    loop: str = "asyncio"
    repeat: int = 5
    #: After the first turn, no turn begins that would end later than this after the warm-up.
    seconds: float = 210.0


@dataclass(frozen=True, slots=True)
class SpeculateTurn:
    """Tokens a second in one turn."""

    copied: float
    predicted: float
    looked_up: float
    told: float
    told_looked_up: float
    told_mispredicted: float
    #: Share of the predicted copy's tokens that were drafted.
    accepted: float
    #: Whether the three copies are equal, as 1.0 or 0.0.
    equal: float


@dataclass(frozen=True, slots=True)
class CrowdTurn:
    """The rates of many copies at once, in tokens a second over all of them."""

    plain: float
    predicted: float


@dataclass(frozen=True, slots=True)
class SpeculateResult:
    """Medians of the turns, by what is compared."""

    predicted: SpeculateTurn
    looked_up: SpeculateTurn
    told: SpeculateTurn
    mispredicted: SpeculateTurn
    many: CrowdTurn
    #: Share of the turns whose copies were equal: logits depend on a step's shape in their last
    #: bits.
    equal: float
    #: Turns that there was time for.
    turns: int

    def figures(self) -> tuple[Figure, ...]:
        ratio = "x"
        copy, told = self.predicted, self.told
        return (
            Figure("copy, one request", copy.copied, "tokens/s", "higher"),
            Figure("  with prediction=", copy.predicted / copy.copied, ratio, "higher", 2.0),
            Figure("  of its tokens guessed", copy.accepted, "", "higher"),
            Figure(
                "  with prompt-lookup",
                self.looked_up.looked_up / self.looked_up.copied,
                ratio,
                "higher",
            ),
            Figure("  answers equal in so many turns", self.equal, "", "higher", 1.0),
            Figure("text without repetition", told.told, "tokens/s", "higher"),
            Figure("  with prompt-lookup", told.told_looked_up / told.told, ratio, "higher", 0.95),
            Figure(
                "  with a wrong prediction",
                self.mispredicted.told_mispredicted / self.mispredicted.told,
                ratio,
                "higher",
                0.95,
            ),
            Figure("copies together", self.many.plain, "tokens/s", "higher"),
            Figure(
                "  with prediction=", self.many.predicted / self.many.plain, ratio, "higher", 0.95
            ),
            Figure("turns", self.turns, "", "higher"),
        )


def measure_speculate(
    options: SpeculateOptions, report: Callable[[str], None] = lambda _: None
) -> SpeculateResult:
    """Run everything; `report` is told what is going on."""
    return run_on(options.loop, _measure, options, report)


async def _measure(options: SpeculateOptions, report: Callable[[str], None]) -> SpeculateResult:
    report("opening two engines, without proposers and with prompt-lookup")
    turns: list[SpeculateTurn] = []
    crowds: list[CrowdTurn] = []
    # Prompts stay cached after the warm-up, so a turn is little but decoding.
    async with (
        Engine(options.model) as plain,
        Engine(options.model, proposers=["prompt-lookup"]) as lookup,
    ):
        bench = _Bench(plain, lookup, min(options.tokens, _WARMING), options.running)
        await bench.turn(0, report)
        await bench.crowd(report)
        bench.tokens = options.tokens
        began, longest = time.perf_counter(), 0.0
        for turn in range(1, options.repeat + 1):
            at = time.perf_counter()
            if turns and at + longest > began + options.seconds:
                break

            def tell(what: str, turn: int = turn) -> None:
                report(f"turn {turn} of {options.repeat}: {what}")

            turns.append(await bench.turn(turn, tell))
            if turn % 2:
                # The crowd takes most of a turn's time.
                crowds.append(await bench.crowd(tell))
            longest = max(longest, time.perf_counter() - at)
    return SpeculateResult(
        predicted=median(turns, lambda turn: turn.predicted / turn.copied),
        looked_up=median(turns, lambda turn: turn.looked_up / turn.copied),
        told=median(turns, lambda turn: turn.told_looked_up / turn.told),
        mispredicted=median(turns, lambda turn: turn.told_mispredicted / turn.told),
        many=median(crowds, lambda turn: turn.predicted / turn.plain),
        equal=sum(turn.equal for turn in turns) / len(turns),
        turns=len(turns),
    )


@dataclass(slots=True)
class _Bench:
    """The engines, and the requests that they get."""

    plain: Engine
    lookup: Engine
    tokens: int
    running: int

    async def turn(self, turn: int, report: Callable[[str], None]) -> SpeculateTurn:
        report("a file is copied")
        copied, first = await self._decode(self.plain, 1, _COPY)
        predicted, second = await self._decode(self.plain, 1, _COPY | _HINT)
        looked_up, third = await self._decode(self.lookup, 1, _COPY)
        kinds = [(self.plain, {}), (self.lookup, {}), (self.plain, _HINT)]
        # Seconds per token of each kind, over all texts.
        paces = [0.0] * len(kinds)
        for text in range(_TEXTS):
            report(f"text {text + 1} of {_TEXTS} that does not repeat itself")
            asked = {"prompt": _TOLD, "temperature": 1.0, "seed": _TEXTS * turn + text}
            # Each kind comes first once, since the load of a machine drifts.
            for place in range(len(kinds)):
                kind = (text + place) % len(kinds)
                engine, more = kinds[kind]
                speed, _ = await self._decode(engine, 1, asked | more)
                paces[kind] += 1 / (_TEXTS * speed)
        accepted = second.usage.accepted_tokens / self.tokens
        equal = float(first.token_ids == second.token_ids == third.token_ids)
        told, lookup, missed = (1 / pace for pace in paces)
        return SpeculateTurn(copied, predicted, looked_up, told, lookup, missed, accepted, equal)

    async def crowd(self, report: Callable[[str], None]) -> CrowdTurn:
        report(f"{self.running} copies at once")
        plain, _ = await self._decode(self.plain, self.running, _COPY)
        predicted, _ = await self._decode(self.plain, self.running, _COPY | _HINT)
        return CrowdTurn(plain, predicted)

    async def _decode(
        self, engine: Engine, requests: int, asked: Mapping[str, Any]
    ) -> tuple[float, Completion]:
        """Tokens a second of so many requests together after their first tokens, and one answer."""
        seconds, done = await answer_together(engine, self.tokens, [asked] * requests)
        # The prompt takes equally long with and without drafts.
        waited = min(each.timings.ttft for each in done)
        return requests * (self.tokens - 1) / (seconds - waited), done[0]
