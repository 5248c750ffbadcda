"""`FakeRunner`: a step runner without tensors whose answer depends on every KV entry it reads.

See `asyncinfer.testing.oracle` for what it computes. Like a real runner it knows only what plans
tell it (leaves, joins, grown tables, copies), keeps its own slots, and feeds the tokens it drew to
the next step whether or not they were collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from asyncinfer.chunk import TokenLogprob
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import RowLogprobs, RunnerSpec, Step, StepResult
from asyncinfer.testing.fake_layers import FullLayer, WindowLayer, mix_each
from asyncinfer.testing.fake_pages import FakePages
from asyncinfer.testing.fake_slots import FakeSlots
from asyncinfer.testing.oracle import A, fake_kv, fake_logprob, next_token, oracle

__all__ = ["FakeRunner", "Gate"]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

#: Called with "launch" or "collect" before either; may block, may raise.
Gate = Callable[[Literal["launch", "collect"], Step], None]


class FakeRunner:
    """A `StepRunner` over hashes instead of tensors.

    Args:
        strict: read every KV entry of every row through its block table (simulation). Otherwise
            only the last one, whose stored digest stands for those before it (benchmarks: 256
            decode rows cost about as much as a replayed CUDA graph's launch).
        eos_every: about one draw in so many is the end-of-text token `EOS_ID`; None: never.
        gate: called at every launch and collect.
        failing: rows of a plan that fail, with the reason; garbage is written as their KV.
        no_room: whether there is no room to compute a plan: launching it is a `MemoryError`.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        *,
        strict: bool = False,
        eos_every: int | None = None,
        gate: Gate | None = None,
        failing: Callable[[Step], Mapping[int, Exception]] | None = None,
        no_room: Callable[[Step], bool] | None = None,
    ) -> None:
        self._spec = spec
        self.strict = strict
        self.eos_every = eos_every
        self.gate = gate
        self.failing = failing
        self.no_room = no_room
        self.closed = False
        self.launched = 0
        self.collected = 0
        self._slots = FakeSlots(spec)
        self._full = FullLayer(spec, self._slots)
        self._near = [
            WindowLayer(spec, self._slots, number, group.window)
            for number, group in enumerate(spec.groups)
            if group.window is not None
        ]
        #: What each KV group stores.
        self.pages: list[FakePages] = [self._full, *self._near]
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

    # -- StepRunner ----------------------------------------------------------------------------

    def launch(self, plan: Step) -> object:
        if self.gate is not None:
            self.gate("launch", plan)
        assert not self.closed, "launch after close"
        self._slots.apply(plan)
        if self.no_room is not None and self.no_room(plan):
            raise MemoryError(f"no room for a step of {plan.tokens} tokens")
        for pages, changes in zip(self.pages, plan.groups, strict=False):
            pages.copy(changes.copies)
        self._slots.check(plan)
        if self.strict:
            self._slots.check_writes(plan)
        result = self._compute(plan)
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

    # -- the forward pass ----------------------------------------------------------------------

    def _compute(self, plan: Step) -> StepResult:
        slots, starts = np.array(plan.slots), np.array(plan.starts)
        counts = np.array(plan.counts)
        ends = starts + counts
        # Every read comes before every write: a page another row writes in this step is stale.
        kv, digest = self._full.read(slots, starts, strict=self.strict)
        single = counts == 1
        if self._near:
            self._compute_windows(plan, kv, digest)
        elif single.all():
            digest = self._full.decode(slots, starts, kv, digest)
        else:
            index = np.nonzero(single)[0]
            digest[index] = self._full.decode(slots[index], starts[index], kv[index], digest[index])
            for row in np.nonzero(~single)[0].tolist():
                digest[row] = self._full.prefill(
                    plan.slots[row], plan.starts[row], plan.counts[row], kv[row], digest[row]
                )
        self._slots.computed[slots] = ends
        result = self._draw(plan, slots, ends, digest)
        for row, k in plan.prompt_logprobs.items():
            result.prompt_logprobs[row] = self._prompt_logprobs(plan, row, k)  # type: ignore[index]
        if self.failing is not None:
            result.failed = dict(self.failing(plan))
            for row in result.failed:
                for pages in self.pages:
                    pages.spoil(plan.slots[row], plan.starts[row], plan.counts[row])
        return result

    def _compute_windows(self, plan: Step, kv: U64, digest: U64) -> None:
        """Rows token by token; updates the digests."""
        windows = [
            [layer.read(slot, start) for layer in self._near]
            for slot, start in zip(plan.slots, plan.starts, strict=True)
        ]
        for row, seen in enumerate(windows):
            slot, start = plan.slots[row], plan.starts[row]
            tokens = self._slots.history[slot, start : start + plan.counts[row]].tolist()
            kvs, *nears = zip(*fake_kv(tokens, seen, int(kv[row])), strict=True)
            digest[row] = self._full.write(slot, start, np.array(kvs, np.uint64), digest[row])
            for layer, near in zip(self._near, nears, strict=True):
                layer.write(slot, start, near)

    def _draw(self, plan: Step, slots: I64, ends: I64, digest: U64) -> StepResult:
        rows = np.nonzero(np.array(plan.samples))[0]
        slots, last, digest = slots[rows], ends[rows] - 1, digest[rows]
        seeds = mix_each(self._slots.seeds[slots] + last.astype(np.uint64) * np.uint64(A))
        h = mix_each(digest ^ np.where(self._slots.sampled[slots], seeds, np.uint64(0)))
        tokens = (1 + h % np.uint64(self._spec.vocab_size - 1)).astype(np.int64)
        if self.eos_every is not None:
            tokens[(h >> np.uint64(40)) % np.uint64(self.eos_every) == 0] = 0
        logprobs: dict[int, RowLogprobs] = {}
        if self._slots.special:
            for i, slot in enumerate(slots.tolist()):
                if slot in self._slots.special:
                    position = int(last[i])
                    tokens[i] = token = self._special_draw(slot, position, int(digest[i]))
                    k = self._slots.tenant(slot).params.logprobs
                    if k is not None:
                        entry = self.logprob(token, position + 1, k)
                        logprobs[int(rows[i])] = RowLogprobs.of([entry])
        self._slots.history[slots, last + 1] = tokens
        self._slots.known[slots] += 1
        return StepResult(tokens=tokens.tolist(), logprobs=logprobs, prompt_logprobs={})

    def _special_draw(self, slot: int, position: int, digest: int) -> int:
        join = self._slots.tenant(slot)
        early = position + 1 - join.prompt_len < join.params.min_tokens
        return next_token(
            digest,
            position,
            seed=None if join.params.greedy else join.seed,
            vocab_size=self._spec.vocab_size,
            eos_every=self.eos_every,
            barred=join.stop_ids if early else (),
        )

    def _prompt_logprobs(self, plan: Step, row: int, alternatives: int) -> RowLogprobs:
        slot, start = plan.slots[row], plan.starts[row]
        end = min(start + plan.counts[row] + 1, self._slots.tenant(slot).prompt_len)
        return RowLogprobs.of(
            [
                self.logprob(int(self._slots.history[slot, p]), p, alternatives)
                for p in range(start + 1, end)
            ]
        )
