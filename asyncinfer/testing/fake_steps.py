"""`FakeSteps`: what the fake runners have in common: the order of steps, faults put in by hand, and
the right answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from asyncinfer.chunk import TokenLogprob
from asyncinfer.grammar import Matcher, allowed_ids, fill_masks
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Join, RowLogprobs, RunnerSpec, Step, StepResult
from asyncinfer.testing.fake_adapters import FakeAdapters
from asyncinfer.testing.oracle import (
    EOS_ID,
    MASK,
    A,
    adapted,
    fake_logprob,
    mix,
    next_token,
    oracle,
    windows_of,
)

__all__ = ["FakeSteps", "Gate"]

#: Called with "launch" or "collect" before either; may block, may raise.
Gate = Callable[[Literal["launch", "collect"], Step], None]


class FakeSteps(ABC):
    """A `StepRunner` that computes a step as it is launched.

    Args:
        eos_every: about one draw in so many is the end-of-text token `EOS_ID`; None: never.
        gate: called at every launch and collect.
        failing: the rows of a step that fail, with the reason; garbage is written as their KV.
        no_room: whether there is no room to compute a step: launching it is a `MemoryError`.
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
        #: The LoRA adapters of requests; None where it takes none.
        self.adapters: FakeAdapters | None = None
        self.closed = False
        self.launched = 0
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
            windows=windows_of(self._spec.groups),
        )

    def logprob(
        self, token: int, position: int, alternatives: int, ids: tuple[int, ...] | None = None
    ) -> TokenLogprob:
        """The logprob entry of `token` at `position` of its sequence, see `fake_logprob`."""
        return fake_logprob(token, position, alternatives, self._spec.vocab_size, ids)

    def launch(self, step: Step) -> object:
        if self.gate is not None:
            self.gate("launch", step)
        assert not self.closed, "launch after close"
        self._apply(step)
        if self.no_room is not None and self.no_room(step):
            self._lack(step)
            raise MemoryError(f"no room for a step of {step.tokens} tokens")
        result = self._compute(step)
        if self.failing is not None:
            failed = self.failing(step)
            for row in failed:
                self._spoil(step, row)
            result.failed = {**result.failed, **failed}
        self.launched += 1
        self._pending.append((step, result))
        return step

    def prepare(self) -> bool:
        return False

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, Step)
        if self.gate is not None:
            self.gate("collect", handle)
        assert self._pending, "collect without a launch"
        step, result = self._pending.popleft()
        assert step is handle, f"step {handle.number} collected before step {step.number}"
        return result

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True

    @abstractmethod
    def _apply(self, step: Step) -> None:
        """Apply leaves, joins and grown tables, which stand even if there is no room for the
        rows."""

    @abstractmethod
    def _compute(self, step: Step) -> StepResult:
        """Copy pages and compute the rows. Raises `AssertionError` unless these fit what the slots
        hold. `failed` is left empty."""

    def _lack(self, step: Step) -> None:
        """What is done and undone in a step that there is no room for; nothing here."""
        return

    @abstractmethod
    def _spoil(self, step: Step, row: int) -> None:
        """Put garbage in place of what a row stored."""

    def _next_token(
        self,
        join: Join,
        position: int,
        digest: int,
        matcher: Matcher | None = None,
        draft: Sequence[int] = (),
    ) -> int:
        """The token that a request draws after `position`: each that fits is as likely. The matcher
        does not know the tokens of `draft` yet, which come before."""
        digest = adapted(digest, self._adapter(join))
        if matcher is not None:
            key = 0 if join.params.greedy else mix((join.seed + position * A) & MASK)
            if EOS_ID in draft:
                # Nothing may follow: what is drawn means nothing.
                return EOS_ID
            ids = allowed_ids(fill_masks([matcher], [draft])[-1], self._spec.vocab_size)
            return int(ids[mix(digest ^ key) % len(ids)])
        early = position + 1 - join.prompt_len < join.params.min_tokens
        return next_token(
            digest,
            position,
            seed=None if join.params.greedy else join.seed,
            vocab_size=self._spec.vocab_size,
            eos_every=self.eos_every,
            barred=join.stop_ids if early else (),
        )

    def _adapter(self, join: Join) -> int:
        """The number of a request's adapter; 0 without one."""
        return 0 if self.adapters is None else self.adapters.content(join.adapter)

    def _score(self, tokens: Sequence[int], start: int, alternatives: int) -> RowLogprobs:
        """Logprobs of a prompt's tokens from `start` on."""
        return RowLogprobs.of(
            [self.logprob(token, p, alternatives) for p, token in enumerate(tokens, start)]
        )
