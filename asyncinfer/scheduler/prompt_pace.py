"""`PromptPace` bounds the prompt tokens that share a step with answers."""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median_high
from typing import Final

from asyncinfer.scheduler.step import Step
from asyncinfer.speculation import StepCosts

__all__ = ["PromptPace"]

#: The steps whose median is the speed: of three, one slow step changes nothing, two do.
_RECENT: Final = 3
#: Blocks in a prompt's chunk before any speed is known.
_FIRST_BLOCKS: Final = 4
#: Chunks above a block are multiples of so many tokens, or of a smaller block: products then come
#: in few shapes, and little of the target is unused.
_GRAIN: Final = 8
#: Where answers alone take longer than the target, a step may take so many times as long as they
#: do. A prompt thus gets a third of the time, however slow the machine is.
_SLOWED: Final = 1.5
#: The factor by which the least seconds per token grow with each step, in case the machine has
#: become slower.
_FORGOTTEN: Final = 1.01
#: The share of the time of answers alone that is subtracted from a step with prompts. It is below
#: one, in case the machine has become faster since that time was measured.
_KNOWN: Final = 0.75


class PromptPace:
    """Fits prompt chunks to a time, so that answers in the same steps keep their pace.

    The speed of prompts is measured on the last steps with prompts, less the time that answers
    alone would have taken. Since steps have a fixed cost, chunks are too small at first, and grow
    from step to step until a step takes the target.

    Args:
        target: seconds that a step with answers should take; None: as long as it does.
        block_size: tokens of the smallest chunk.
        costs: knows what steps of answers alone take.
    """

    def __init__(self, target: float | None, block_size: int, costs: StepCosts) -> None:
        self._target = inf if target is None else target
        self._block_size = block_size
        self._costs = costs
        #: For each of the last steps with prompts: its seconds, and its seconds per prompt token.
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._each: deque[float] = deque(maxlen=_RECENT)
        #: The least seconds per prompt token, measured in a large chunk, where the fixed cost of a
        #: step matters least.
        self._least = inf

    def room(self, answers: int) -> float:
        """The most prompt tokens of a step that also has rows of `answers`: at least a block of
        them, so that prompts always progress; infinity if nobody waits for the step."""
        if not answers or self._target == inf:
            return inf
        size, grain = self._block_size, min(self._block_size, _GRAIN)
        if not self._each:
            return _FIRST_BLOCKS * size
        each = median_high(self._each)
        if each <= 0.0:
            return inf
        alone = self._alone(answers, median_high(self._seconds))
        seconds = max(self._target, _SLOWED * alone) - _KNOWN * alone
        return float(max(size, round(seconds / each / grain) * grain))

    def seconds(self, tokens: int) -> float:
        """The least seconds that so many prompt tokens take; 0.0 before any speed is known."""
        return tokens * self._least if self._least < inf else 0.0

    def computed(self, step: Step, seconds: float) -> None:
        """A step with rows of prompts took `seconds`."""
        tokens = sum(step.counts[step.answers :])
        if tokens:
            alone = self._alone(step.answers, seconds)
            self._seconds.append(seconds)
            each = (seconds - _KNOWN * alone) / tokens
            self._each.append(each)
            if each > 0.0:
                self._least = min(_FORGOTTEN * self._least, each)

    def _alone(self, answers: int, most: float) -> float:
        """Seconds of a step of answers alone, at most `most`, the time of the same step with
        prompts: an old measurement may be too high."""
        return min(most, self._costs.seconds(answers)) if answers else 0.0
