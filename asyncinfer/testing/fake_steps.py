"""`FakeSteps`: what the fake runners have in common: the order of steps, faults put in by hand, and
the right answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from asyncinfer.chunk import TokenLogprob
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Join, RowLogprobs, RunnerSpec, Step, StepResult
from asyncinfer.testing.oracle import fake_logprob, next_token, oracle

__all__ = ["FakeSteps", "Gate"]

#: Called with "launch" or "collect" before either; may block, may raise.
Gate = Callable[[Literal["launch", "collect"], Step], None]


class FakeSteps(ABC):
    """A `StepRunner` that computes a step as it is launched.

    Args:
        eos_every: about one draw in so many is the end-of-text token `EOS_ID`; None: never.
        gate: called at every launch and collect.
        failing: rows of a plan that fail, with the reason; garbage is written as their KV.
        no_room: whether there is no room to compute a plan: launching it is a `MemoryError`.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        *,
        eos_every: int | None = None,
        gate: Gate | None = None,
        failing: Callable[[Step], Mapping[int, Exception]] | None = None,
        no_room: Callable[[Step], bool] | None = None,
    ) -> None:
        self._spec = spec
        self.eos_every = eos_every
        self.gate = gate
        self.failing = failing
        self.no_room = no_room
        self.closed = False
        self.launched = 0
        self.collected = 0
        self._pending: deque[tuple[Step, StepResult]] = deque()

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def oracle(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        count: int,
        *,
        stop_ids: Iterable[int] = (),
    ) -> list[int]:
        """What this runner must answer; see `asyncinfer.testing.oracle.oracle`."""
        return oracle(
            prompt_ids,
            params,
            seed,
            count,
            vocab_size=self._spec.vocab_size,
            eos_every=self.eos_every,
            stop_ids=frozenset(stop_ids),
            windows=[group.window for group in self._spec.groups if group.window is not None],
        )

    def logprob(self, token: int, position: int, alternatives: int) -> TokenLogprob:
        """The logprob entry of `token` at `position` of its sequence."""
        return fake_logprob(token, position, alternatives, self._spec.vocab_size)

    def launch(self, plan: Step) -> object:
        if self.gate is not None:
            self.gate("launch", plan)
        assert not self.closed, "launch after close"
        self._apply(plan)
        if self.no_room is not None and self.no_room(plan):
            raise MemoryError(f"no room for a step of {plan.tokens} tokens")
        result = self._compute(plan)
        if self.failing is not None:
            result.failed = dict(self.failing(plan))
            for row in result.failed:
                self._spoil(plan, row)
        self.launched += 1
        self._pending.append((plan, result))
        return plan

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, Step)
        if self.gate is not None:
            self.gate("collect", handle)
        assert self._pending, "collect without a launch"
        plan, result = self._pending.popleft()
        assert plan is handle, f"step {handle.number} collected before step {plan.number}"
        self.collected += 1
        return result

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True

    @abstractmethod
    def _apply(self, plan: Step) -> None:
        """Leaves, joins and grown tables, which hold also where there is no room for the rows."""

    @abstractmethod
    def _compute(self, plan: Step) -> StepResult:
        """Copy pages and compute the rows. Raises `AssertionError` unless these fit what the slots
        hold. `failed` is left empty."""

    @abstractmethod
    def _spoil(self, plan: Step, row: int) -> None:
        """Put garbage in place of what a row stored."""

    def _next_token(self, join: Join, position: int, digest: int) -> int:
        """The token that a request draws after `position`."""
        early = position + 1 - join.prompt_len < join.params.min_tokens
        return next_token(
            digest,
            position,
            seed=None if join.params.greedy else join.seed,
            vocab_size=self._spec.vocab_size,
            eos_every=self.eos_every,
            barred=join.stop_ids if early else (),
        )

    def _score(self, tokens: Sequence[int], start: int, alternatives: int) -> RowLogprobs:
        """Logprobs of a prompt's tokens from `start` on."""
        return RowLogprobs.of(
            [self.logprob(token, p, alternatives) for p, token in enumerate(tokens, start)]
        )
