"""`StepDriver`: decode steps and prefills on the engine's own runner, without an engine."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque

from asyncinfer import SamplingParams
from asyncinfer.bench.record import BenchError
from asyncinfer.testing import Join, PageChanges, Step, StepResult, StepRunner

__all__ = ["StepDriver"]

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class StepDriver:
    """Hands a runner plans as a scheduler would, and times it by the host's clock.

    Steps overlap as in an engine: one is launched before the one before it is collected, where the
    runner computes on a device of its own. What a step takes is the time from one result to the
    next.
    """

    def __init__(self, runner: StepRunner, *, ahead: int = 1, seed: int = 0) -> None:
        """`ahead`: steps in flight at once."""
        self.runner = runner
        self._spec = runner.spec
        self._random = random.Random(seed)
        self._steps = itertools.count()
        self._blocks = list(range(self._spec.num_blocks))
        # Pages that lie apart, as after hours of service.
        self._random.shuffle(self._blocks)
        self._ahead = ahead
        #: Slots that the next plan frees.
        self._leaving: list[int] = []

    def prefill(self, tokens: int) -> float:
        """Seconds from the launch of a prompt's first chunk until its first token is here."""
        (blocks,) = self._share(1, tokens + 1)
        plans = self._chunks(self._join(0, self._tokens(tokens), blocks), tokens, draw=True)
        began = time.perf_counter()
        flights = [self.runner.launch(plan) for plan in plans]
        for flight in flights:
            self._checked(self.runner.collect(flight))
        seconds = time.perf_counter() - began
        self._leaving = [0]
        return seconds

    def decode(self, batch: int, context: int, *, steps: int, warmup: int = 4) -> list[float]:
        """Seconds of each of `steps` steps of `batch` rows, the first of which attend to about
        `context` tokens. All rows hold the KV of one prompt, in blocks of their own."""
        held = self._share(batch, context + warmup + steps + 2)
        known = self._tokens(context + 1)
        for plan in self._chunks(self._join(0, known, held[0]), context, draw=False):
            self._checked(self.runner.collect(self.runner.launch(plan)))
        filled = -(-(context - 1) // self._spec.block_size)
        for slot in range(1, batch):
            # One row at a time, because a step holds twice what it copies. All of a row but its
            # last token is copied.
            plan = Step(next(self._steps), [slot], [context - 1], [1], [0])
            plan.joins.append(self._join(slot, known, held[slot]))
            copies = list(zip(held[0][:filled], held[slot][:filled], strict=True))
            plan.groups.append(PageChanges(copies=copies))
            self._checked(self.runner.collect(self.runner.launch(plan)))
        plans = self._decodes(batch, context, warmup + steps)
        flights: deque[object] = deque()
        ended: list[float] = []
        for step in [*plans, *[None] * (self._ahead - 1)]:
            if step is not None:
                flights.append(self.runner.launch(step))
            if step is None or len(flights) == self._ahead:
                self._checked(self.runner.collect(flights.popleft()))
                ended.append(time.perf_counter())
        self._leaving = list(range(batch))
        spent = [after - before for before, after in itertools.pairwise(ended)]
        return spent[warmup - 1 :]

    def _chunks(self, join: Join, tokens: int, *, draw: bool) -> list[Step]:
        """The first `tokens` tokens of a request that joins with them."""
        size = self._spec.max_step_tokens
        plans = []
        for start in range(0, tokens, size):
            count = min(size, tokens - start)
            samples = int(draw and start + count == tokens)
            plans.append(Step(next(self._steps), [0], [start], [count], [samples]))
        plans[0].joins.append(join)
        plans[0].leaves += self._leaving
        self._leaving = []
        return plans

    def _decodes(self, batch: int, context: int, steps: int) -> list[Step]:
        """Made before the clock runs."""
        slots, ones = list(range(batch)), [1] * batch
        return [
            Step(next(self._steps), slots, [context + step] * batch, ones, ones)
            for step in range(steps)
        ]

    def _share(self, rows: int, tokens: int) -> list[list[int]]:
        """Blocks for `tokens` tokens of each row."""
        each = -(-tokens // self._spec.block_size)
        for name, asked, there in (
            ("num_blocks", rows * each, self._spec.num_blocks),
            ("max_slots", rows, self._spec.max_slots),
            ("max_context", tokens, self._spec.max_context),
        ):
            if asked > there:
                raise BenchError(f"{rows} rows of {tokens} tokens: {name} is {there}, not {asked}")
        return [self._blocks[row * each : (row + 1) * each] for row in range(rows)]

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._spec.vocab_size), k=count)

    def _join(self, slot: int, tokens: list[int], blocks: list[int]) -> Join:
        tables = [blocks, *([] for _ in self._spec.groups[1:])]
        return Join(slot, tokens, len(tokens), tables, _GREEDY, seed=slot)

    def _checked(self, result: StepResult) -> None:
        for row, error in result.failed.items():
            raise BenchError(f"row {row} of a step failed: {error}") from error
