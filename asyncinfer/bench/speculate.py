"""`asyncinfer bench speculate`: what guessed tokens save, and what they cost."""

from __future__ import annotations

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
#: What the caller expects: the file before an edit, which is wrong in four places.
_EXPECTED: Final = _FILE.replace("amount", "value", 2).replace("self.balance", "self.total", 2)
#: A text that goes on without repeating itself, drawn at temperature 1.
_TOLD: Final = "The old harbour master opened his diary and began to write about the storm. "


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


@dataclass(frozen=True, slots=True)
class SpeculateTurn:
    """Tokens a second in one turn."""

    copied: float
    predicted: float
    looked_up: float
    told: float
    told_looked_up: float
    told_mispredicted: float
    many: float
    many_predicted: float
    #: Share of the predicted copy's tokens that were drafted.
    accepted: float
    #: Whether the three copies are equal, as 1.0 or 0.0.
    equal: float


@dataclass(frozen=True, slots=True)
class SpeculateResult:
    """Medians of the turns, by what is compared."""

    predicted: SpeculateTurn
    looked_up: SpeculateTurn
    told: SpeculateTurn
    mispredicted: SpeculateTurn
    many: SpeculateTurn
    #: Share of the turns whose copies were equal: logits depend on a step's shape in their last
    #: bits.
    equal: float

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
            Figure("copies together", self.many.many, "tokens/s", "higher"),
            Figure(
                "  with prediction=", self.many.many_predicted / self.many.many, ratio, "higher"
            ),
        )


def measure_speculate(
    options: SpeculateOptions, report: Callable[[str], None] = lambda _: None
) -> SpeculateResult:
    """Run everything; `report` is told what is going on."""
    return run_on(options.loop, _measure, options, report)


async def _measure(options: SpeculateOptions, report: Callable[[str], None]) -> SpeculateResult:
    model, turns = options.model, []
    async with (
        Engine(model, prefix_cache=False) as plain,
        Engine(model, prefix_cache=False, proposers=["prompt-lookup"]) as lookup,
    ):
        copy: dict[str, Any] = {"prompt": _COPIED, "temperature": 0.0}
        hint = {"prediction": _EXPECTED}
        for turn in range(options.repeat + 1):
            report(f"turn {turn} of {options.repeat}" if turn else "warm-up")
            told: dict[str, Any] = {"prompt": _TOLD, "temperature": 1.0, "seed": turn}
            tokens, running = options.tokens, options.running
            copied, first = await _decode(plain, tokens, 1, copy)
            predicted, second = await _decode(plain, tokens, 1, {**copy, **hint})
            looked_up, third = await _decode(lookup, tokens, 1, copy)
            equal = first.token_ids == second.token_ids == third.token_ids
            found = SpeculateTurn(
                copied,
                predicted,
                looked_up,
                (await _decode(plain, tokens, 1, told))[0],
                (await _decode(lookup, tokens, 1, told))[0],
                (await _decode(plain, tokens, 1, {**told, **hint}))[0],
                (await _decode(plain, tokens, running, copy))[0],
                (await _decode(plain, tokens, running, {**copy, **hint}))[0],
                second.usage.accepted_tokens / tokens,
                float(equal),
            )
            if turn:
                turns.append(found)
    return SpeculateResult(
        predicted=median(turns, lambda turn: turn.predicted / turn.copied),
        looked_up=median(turns, lambda turn: turn.looked_up / turn.copied),
        told=median(turns, lambda turn: turn.told_looked_up / turn.told),
        mispredicted=median(turns, lambda turn: turn.told_mispredicted / turn.told),
        many=median(turns, lambda turn: turn.many_predicted / turn.many),
        equal=sum(turn.equal for turn in turns) / len(turns),
    )


async def _decode(
    engine: Engine, tokens: int, requests: int, asked: Mapping[str, Any]
) -> tuple[float, Completion]:
    """Tokens a second of so many requests together after their first tokens, and an answer."""
    seconds, done = await answer_together(engine, tokens, [asked] * requests)
    # The prompt takes as long with and without drafts.
    waited = min(each.timings.ttft for each in done)
    return requests * (tokens - 1) / (seconds - waited), done[0]
