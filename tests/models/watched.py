"""`Watched`: a runner, and what its predictor predicted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from asyncinfer.models import Decoder
from asyncinfer.scheduler import Sequence, Step, StepResult

__all__ = ["Predicted", "Watched"]


@dataclass
class Predicted:
    """A predicted token: those before it, the last of which were predicted with it."""

    sequence: Sequence
    known: list[int]
    chain: list[int]
    token: int
    #: float32 `[vocab]`.
    logits: torch.Tensor

    @property
    def position(self) -> int:
        return len(self.known) + len(self.chain)


class Watched:
    """Stands in front of a runner, and keeps each prediction with the logits that it is of."""

    def __init__(self, runner: Any, decoder: Decoder) -> None:
        self._runner = runner
        self._logits = decoder.predicted_logits
        decoder.predicted_logits = self._predicted_logits  # type: ignore[method-assign]
        self._steps: deque[Step] = deque()
        self._computed: list[torch.Tensor] = []
        self._pending: list[tuple[Sequence, int, list[int], list[torch.Tensor]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def _predicted_logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = self._logits(states)
        self._computed.append(logits.clone())
        return logits

    def launch(self, step: Step) -> object:
        self._steps.append(step)
        return self._runner.launch(step)

    def collect(self, handle: object) -> StepResult:
        result: StepResult = self._runner.collect(handle)
        sequences = self._steps.popleft().sequences
        for number, logits in enumerate(self._computed):
            rows = [row for row, (_, chain) in result.predicted.items() if len(chain) > number]
            for row, each in zip(rows, logits, strict=True):
                position, chain = result.predicted[row]
                self._pending.append((sequences[row], position, [*chain[: number + 1]], [each]))
        self._computed = []
        return result

    @property
    def found(self) -> list[Predicted]:
        """Once the answers are whole."""
        return [
            Predicted(sequence, sequence.tokens[:position], chain[:-1], chain[-1], logits)
            for sequence, position, chain, (logits,) in self._pending
        ]
