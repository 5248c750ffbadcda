"""Prompts with known answers, and the check of what consumers have received."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from asyncinfer import SamplingParams
from asyncinfer.testing import FakeRunner

__all__ = ["Case", "Cases", "Counts", "Reader"]

#: Cases at hand at once; each is asked for many times, so that prefixes are found in the cache.
AT_HAND = 256
FAMILIES = 32


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and the answer that the model must give."""

    prompt: str
    params: SamplingParams
    answer: tuple[int, ...]


class Cases:
    """Requests with shared beginnings, greedy and sampled ones, replaced little by little: the
    prefix cache finds some of every prompt, and has to give something up all the time."""

    def __init__(self, runner: FakeRunner, seed: int, shortest: int, longest: int) -> None:
        self._runner = runner
        self._random = random.Random(seed)
        self._answers = shortest, longest
        self._families = [self._text(64) for _ in range(FAMILIES)]
        self._cases = [self._make() for _ in range(AT_HAND)]

    def draw(self, choose: random.Random) -> Case:
        return choose.choice(self._cases)

    def replace_one(self) -> None:
        """A new case in the place of an old one; takes about a millisecond."""
        self._cases[self._random.randrange(AT_HAND)] = self._make()

    def _make(self) -> Case:
        prompt = self._random.choice(self._families) + self._text(self._random.randint(1, 128))
        seed = self._random.randrange(2**32)
        count = self._random.randint(*self._answers)
        params = SamplingParams(
            max_tokens=count,
            temperature=float(self._random.random() < 0.5),
            seed=seed,
            ignore_eos=True,
        )
        answer = self._runner.oracle(list(prompt.encode()), params, seed, count)
        return Case(prompt, params, tuple(answer))

    def _text(self, length: int) -> str:
        return "".join(self._random.choices("etaoin shrdlu", k=length))


@dataclass(slots=True)
class Counts:
    """Counts of received tokens."""

    delivered: int = 0
    #: Tokens that never arrived.
    lost: int = 0
    #: Tokens that arrived twice.
    doubled: int = 0
    #: Tokens that differ from the model's answer.
    wrong: int = 0
    #: Tokens that arrived after the stream was closed.
    late: int = 0
    requests: int = 0
    aborted: int = 0


class Reader:
    """Compares one answer with the right one, chunk by chunk."""

    __slots__ = ("_answer", "_counts", "held")

    def __init__(self, case: Case, counts: Counts) -> None:
        self._answer = case.answer
        self._counts = counts
        #: Tokens given so far, at their place in the answer.
        self.held = 0

    def take(self, tokens: Sequence[int]) -> None:
        counts, given = self._counts, tuple(tokens)
        counts.delivered += len(given)
        if given == self._answer[self.held : self.held + len(given)]:
            self.held += len(given)
            return
        for shift in range(1, len(self._answer)):
            for at in (self.held - shift, self.held + shift):
                if at >= 0 and given == self._answer[at : at + len(given)]:
                    counts.doubled += max(0, self.held - at)
                    counts.lost += max(0, at - self.held)
                    self.held = at + len(given)
                    return
        counts.wrong += len(given)
        self.held += len(given)

    def end(self, *, whole: bool) -> None:
        """The stream has ended; `whole`: by itself."""
        self._counts.requests += 1
        if whole:
            self._counts.lost += max(0, len(self._answer) - self.held)
        else:
            self._counts.aborted += 1
