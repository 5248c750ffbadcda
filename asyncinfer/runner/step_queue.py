"""`StepQueue`: decode steps that are computed while Python goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.kernels.native import Arena, EndKernels, RecordedCalls, Recording
from asyncinfer.runner.fixed_inputs import FixedInputs
from asyncinfer.runner.input_batch import StepArrays
from asyncinfer.runner.pending_step import EagerResults
from asyncinfer.runner.queue_pace import MOST_QUEUED, QueuePace
from asyncinfer.runner.replayer import Replayer
from asyncinfer.sampling import Sampled, TokenHistory
from asyncinfer.scheduler import Step, StepResult

__all__ = ["QueuedCalls", "StepQueue", "draws_largest"]

Floats = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class QueuedCalls:
    """The recorded calls of decode steps that follow each other without Python. Each step but the
    first begins with the tokens that the one before has drawn.

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
        self._step = step
        self._most_threads = most_threads
        #: By the step's place: its calls, and what it drew.
        self._made: dict[int, tuple[RecordedCalls, tuple[Floats, I64]]] = {}
        for place in (0, 1):
            self.calls(place)

    def calls(self, place: int) -> RecordedCalls:
        """Those of a step at `place`, see `FixedInputs.send`."""
        if place not in self._made:
            rows = len(self._drawn[0])
            kept = np.zeros(rows, np.float32), np.zeros(rows, np.int64)
            parts = [self._step, self._recorded(lambda: self._keep(kept))]
            if place:
                parts.insert(0, self._recorded(lambda: self._inputs.load(place, self._drawn[1])))
            self._made[place] = RecordedCalls.joined(parts), kept
        return self._made[place][0]

    def drawn(self, place: int) -> Sampled:
        """What the last step at `place` has drawn, in memory of its own."""
        values, tokens = self._made[place][1]
        return Sampled(torch.from_numpy(tokens.copy()), torch.from_numpy(values.copy()))

    def _keep(self, kept: tuple[Floats, I64]) -> None:
        """Keep what a step has drawn, where the next one does not write."""
        for into, drawn in zip(kept, self._drawn, strict=True):
            self._kernels.copy(torch.from_numpy(into), torch.from_numpy(drawn))

    def _recorded(self, make: Callable[[], None]) -> RecordedCalls:
        recording = Recording(Arena(), self._most_threads)
        with recording.begun():
            make()
            recording.end_layer()
        return recording.made()


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step in flight."""

    slots: list[int]
    starts: list[int]
    arrays: StepArrays
    calls: QueuedCalls
    place: int
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


class StepQueue:
    """Decode steps in flight: threads compute one after the other, and do not need the GIL, which
    others of the program may keep for milliseconds each time.

    Args:
        history: gets the tokens that they draw.
        replay: makes their calls.
    """

    def __init__(self, history: TokenHistory, replay: Replayer) -> None:
        self.pace: Final = QueuePace()
        self._history: TokenHistory | None = history
        self._replay: Replayer | None = replay
        self._steps: deque[_Queued] = deque()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._steps)

    @property
    def place(self) -> int:
        """That of the next step, see `FixedInputs.send`."""
        return self._steps[-1].place % MOST_QUEUED + 1 if self._steps else 0

    def precede(self, step: Step) -> bool:
        """Whether `step` may be computed behind them without waiting for their results."""
        if not self._steps:
            return True
        return self.count < MOST_QUEUED and self._steps[-1].precedes(step)

    def add(self, step: Step, arrays: StepArrays, calls: QueuedCalls) -> Callable[[], StepResult]:
        """Begin a step whose inputs are at `place`. Returns what waits for its result."""
        assert self._history is not None
        assert self._replay is not None
        # While only this step would be lost for want of memory.
        self._history.reserve(int(arrays.draw_positions.max()) + 1)
        results = EagerResults(draw_rows=arrays.draw_rows.tolist())
        place = self.place
        self._replay.begin(calls.calls(place), int(arrays.seq_lens.max()), calls)
        self._steps.append(_Queued(step.slots, step.starts, arrays, calls, place, results))
        step.queued = self.pace.steps

        def read() -> StepResult:
            while not results.tensors:
                self._finish()
            return results.read()

        return read

    def finish(self) -> None:
        """Wait for all of them."""
        while self._steps:
            self._finish()

    def close(self) -> None:
        """Wait for them, and forget all that belongs to the model: the results of steps that nobody
        will collect may outlive it."""
        if self._replay is not None:
            self._replay.close()
        self._history = self._replay = None
        self._steps.clear()

    def _finish(self) -> None:
        """Wait for the oldest one."""
        assert self._replay is not None
        assert self._history is not None
        step = self._steps[0]
        self._replay.finish()
        self._steps.popleft()
        self.pace.computed(self._replay.seconds, self._replay.away)
        arrays, results, sampled = step.arrays, step.results, step.calls.drawn(step.place)
        self._history.write(arrays.draw_slots, arrays.draw_positions, sampled.tokens)
        results.tensors = results.keep(sampled)
        self._replay.finished()


def draws_largest(step: Step) -> bool:
    """Whether the step draws a token after each row and nothing but its options restricts it."""
    others = step.guided or step.matchers or step.prompt_logprobs or step.poolings
    plain = not (others or step.drafts or step.predicts)
    return plain and set(step.samples) == {1}
