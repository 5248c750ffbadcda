"""`PromptPace`: how many tokens of prompts share a step with answers."""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median_high
from typing import Final

from asyncinfer.scheduler.step import Step
from asyncinfer.speculation import StepCosts

__all__ = ["PromptPace"]

#: Steps whose median tells the speed: one that was held up changes nothing, two of three do.
_RECENT: Final = 3
#: Blocks of a prompt's chunk before any speed is known.
_FIRST_BLOCKS: Final = 4
#: Chunks of more than a block are multiples of so many tokens, or of a smaller block: products come
#: in few shapes, and little of the target is left unused.
_GRAIN: Final = 8
#: Where answers by themselves take longer than the target, a step takes so many times as long as
#: they do. A prompt so has a third of the time, however slow the machine is.
_SLOWED: Final = 1.5
#: By so much the least seconds for a token are forgotten with each step, in case the machine has
#: become slower.
_FORGOTTEN: Final = 1.01
#: The share of what answers alone take that is no part of a prompt's speed. The rest is, in case
#: the machine has become faster since that was measured.
_KNOWN: Final = 0.75


class PromptPace:
    """Fits the chunks of prompts to a time, so that answers in the same steps keep their pace.

    The speed of prompts is that of the last steps with them, less what their answers would have
    taken alone. As steps have costs of their own, a chunk is too small at first, and grows from
    step to step until its step takes the target.

    Args:
        target: seconds that a step with answers should take; None: as long as it does.
        block_size: tokens of the smallest chunk.
        costs: knows what steps of answers alone take.
    """

    def __init__(self, target: float | None, block_size: int, costs: StepCosts) -> None:
        self._target = inf if target is None else target
        self._block_size = block_size
        self._costs = costs
        #: Of each of the last steps with prompts: its seconds, and those for a token of a prompt.
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._each: deque[float] = deque(maxlen=_RECENT)
        #: The least seconds that a token of a prompt took: in a large chunk, which the step's own
        #: costs are a small part of.
        self._least = inf

    def room(self, answers: int) -> float:
        """Tokens of prompts for a step that also has rows of `answers`: a block of them at least,
        so that a prompt always moves on; infinity where nobody waits for the step."""
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
        """What so many tokens of a prompt take at least; 0.0 before any speed is known."""
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
        """Seconds of a step of answers alone. It takes no longer than the same with prompts, which
        is `most`, whatever was measured long ago."""
        return min(most, self._costs.seconds(answers)) if answers else 0.0
