"""`StepChain`: decode steps of the same rows in one call of native code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.kernels.native import Arena, EndKernels, RecordedCalls, Recording
from asyncinfer.runner.chain_pace import MOST_CHAINED, ChainPace
from asyncinfer.runner.fixed_inputs import FixedInputs
from asyncinfer.runner.input_batch import StepArrays
from asyncinfer.runner.pending_step import EagerResults
from asyncinfer.runner.replayer import Replayer
from asyncinfer.sampling import Sampled, TokenHistory
from asyncinfer.scheduler import Step, StepResult

__all__ = ["DeferredSteps", "StepChain", "draws_largest"]

Floats = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class StepChain:
    """The recorded calls of decode steps, each of which begins with the tokens of the one before.

    Python makes all of these calls at once. So it needs the GIL once for several steps, which other
    threads may keep for milliseconds each time.

    Args:
        inputs: those of the recording, whose vectors and angles `kernels` look up.
        step: the recorded calls of one step.
        drawn: where they leave each row's largest logit and its token, `[rows]` each.
        most_threads: those that a replay may take.
    """

    def __init__(
        self,
        inputs: FixedInputs,
        kernels: EndKernels,
        step: RecordedCalls,
        drawn: tuple[Floats, I64],
        most_threads: int,
    ) -> None:
        self._inputs = inputs
        self._drawn = drawn
        self._kernels = kernels
        self._most_threads = most_threads
        rows = len(drawn[0])
        #: What each step but the last one drew.
        self._kept = [
            (np.zeros(rows, np.float32), np.zeros(rows, np.int64)) for _ in range(MOST_CHAINED - 1)
        ]
        #: By the number of steps less one.
        self._chains = [step]
        for place in range(1, MOST_CHAINED):
            parts = [self._chains[-1], self._between(place), step]
            self._chains.append(RecordedCalls.joined(parts))

    def calls(self, steps: int) -> RecordedCalls:
        """The calls of so many steps."""
        return self._chains[steps - 1]

    def drawn(self, steps: int) -> list[Sampled]:
        """What each step of a chain has drawn, in memory of its own."""
        found = [*self._kept[: steps - 1], self._drawn]
        return [
            Sampled(torch.from_numpy(tokens.copy()), torch.from_numpy(values.copy()))
            for values, tokens in found
        ]

    def _between(self, place: int) -> RecordedCalls:
        """Calls that keep what a step has drawn, and begin the step at `place`."""
        recording = Recording(Arena(), self._most_threads)
        with recording.begun():
            for kept, drawn in zip(self._kept[place - 1], self._drawn, strict=True):
                self._kernels.copy(torch.from_numpy(kept), torch.from_numpy(drawn))
            self._inputs.load(place, self._drawn[1])
            recording.end_layer()
        return recording.made()


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A step that is computed later."""

    slots: list[int]
    starts: list[int]
    arrays: StepArrays
    #: Without tensors until it is computed.
    results: EagerResults

    def precedes(self, step: Step) -> bool:
        """Whether `step` goes on with the tokens that this one draws, and nothing changes but that
        tables grow."""
        if step.slots != self.slots or step.joins or step.forced or step.leaves:
            return False
        if step.tokens != len(step.slots):
            return False
        copies = any(group.copies or group.rewound for group in step.groups)
        return not copies and step.starts == [start + 1 for start in self.starts]


class DeferredSteps:
    """The steps of a chain that are not computed yet.

    Args:
        history: gets the tokens that they draw.
        replay: makes their calls.
    """

    def __init__(self, history: TokenHistory, replay: Replayer) -> None:
        self.pace: Final = ChainPace()
        self._history: TokenHistory | None = history
        self._replay: Replayer | None = replay
        self._chain: StepChain | None = None
        self._steps: list[_Deferred] = []

    @property
    def count(self) -> int:
        return len(self._steps)

    def precede(self, step: Step) -> bool:
        """Whether `step` may be computed with them."""
        return self.count < MOST_CHAINED and (not self._steps or self._steps[-1].precedes(step))

    def add(self, step: Step, arrays: StepArrays, chain: StepChain) -> Callable[[], StepResult]:
        """Defer a step that may be computed with the others, which is done once there are as many
        as `pace` wants. Returns what gives its result, and computes it if that is not so yet."""
        assert self._history is not None
        # While only this step would be lost for want of memory.
        self._history.reserve(int(arrays.draw_positions.max()) + 1)
        results = EagerResults(draw_rows=arrays.draw_rows.tolist())
        self._chain = chain
        self._steps.append(_Deferred(step.slots, step.starts, arrays, results))
        if self.count < self.pace.steps:
            step.chained = self.pace.steps
        else:
            self.compute()

        def read() -> StepResult:
            if not results.tensors:
                self.compute()
            return results.read()

        return read

    def compute(self) -> None:
        """Compute them all."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        assert self._chain is not None
        assert self._replay is not None
        assert self._history is not None
        calls = self._chain.calls(len(steps))
        self._replay(calls, int(steps[-1].arrays.seq_lens.max()))
        self.pace.computed(len(steps), self._replay.seconds, self._replay.away)
        for step, sampled in zip(steps, self._chain.drawn(len(steps)), strict=True):
            arrays, results = step.arrays, step.results
            self._history.write(arrays.draw_slots, arrays.draw_positions, sampled.tokens)
            results.tensors = results.keep(sampled)

    def clear(self) -> None:
        """Forget all that belongs to the model: the results of steps that nobody will collect may
        outlive it."""
        self._history = self._replay = self._chain = None
        self._steps = []


def draws_largest(step: Step) -> bool:
    """Whether the step draws a token after each row and nothing but its options restricts it."""
    others = step.guided or step.matchers or step.prompt_logprobs or step.poolings
    plain = not (others or step.drafts or step.predicts)
    return plain and set(step.samples) == {1}
