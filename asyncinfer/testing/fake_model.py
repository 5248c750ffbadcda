"""`FakeRunner`: a step runner without tensors whose answer depends on every KV entry it reads.

See `asyncinfer.testing.oracle` for what it computes. Like a real runner it knows only what steps
tell it (leaves, joins, grown tables, copies), keeps its own slots, and feeds the tokens it drew to
the next step whether or not they were collected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from asyncinfer.scheduler import RowLogprobs, RunnerSpec, Step, StepResult
from asyncinfer.testing.fake_pages import FakePages, mix_each
from asyncinfer.testing.fake_slots import FakeSlots
from asyncinfer.testing.fake_steps import FakeSteps, Gate
from asyncinfer.testing.oracle import A

__all__ = ["FakeRunner", "Gate"]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class FakeRunner(FakeSteps):
    """A `StepRunner` over hashes instead of tensors, for many rows at once: 256 decode rows cost
    about as much as a replayed CUDA graph's launch.

    Before a row's first token it reads only the last KV entry, whose stored digest stands for the
    others. `StrictRunner` reads them all, and knows windows.
    """

    def __init__(self, spec: RunnerSpec, **options: Any) -> None:
        """`options` are those of `FakeSteps`."""
        assert len(spec.groups) == 1, "no layer has a window"
        super().__init__(spec, **options)
        self._slots = FakeSlots(spec)
        self._pages = FakePages(spec, self._slots)

    def _apply(self, step: Step) -> None:
        self._slots.apply(step)

    def _compute(self, step: Step) -> StepResult:
        for changes in step.groups:
            self._pages.copy(changes.copies)
        self._slots.check(step)
        slots, starts = np.array(step.slots), np.array(step.starts)
        counts = np.array(step.counts)
        ends = starts + counts
        # Every read comes before every write: a page another row writes in this step is stale.
        kv, digest = self._pages.read(slots, starts)
        single = counts == 1
        if single.all():
            digest = self._pages.decode(slots, starts, kv, digest)
        else:
            index = np.nonzero(single)[0]
            digest[index] = self._pages.decode(
                slots[index], starts[index], kv[index], digest[index]
            )
            for row in np.nonzero(~single)[0].tolist():
                digest[row] = self._pages.prefill(
                    step.slots[row], step.starts[row], step.counts[row], kv[row], digest[row]
                )
        self._slots.computed[slots] = ends
        result = self._draw(step, slots, ends, digest)
        for row, k in step.prompt_logprobs.items():
            slot, start = step.slots[row], step.starts[row] + 1
            end = min(start + step.counts[row], self._slots.joined(slot).prompt_len)
            scored = self._slots.history[slot, start:end].tolist()
            result.prompt_logprobs[row] = self._score(scored, start, k)  # type: ignore[index]
        return result

    def _spoil(self, step: Step, row: int) -> None:
        self._pages.spoil(step.slots[row], step.starts[row], step.counts[row])

    def _draw(self, step: Step, slots: I64, ends: I64, digest: U64) -> StepResult:
        rows = np.nonzero(np.array(step.samples))[0]
        slots, last, digest = slots[rows], ends[rows] - 1, digest[rows]
        seeds = mix_each(self._slots.seeds[slots] + last.astype(np.uint64) * np.uint64(A))
        h = mix_each(digest ^ np.where(self._slots.sampled[slots], seeds, np.uint64(0)))
        tokens = (1 + h % np.uint64(self._spec.vocab_size - 1)).astype(np.int64)
        if self.eos_every is not None:
            tokens[(h >> np.uint64(40)) % np.uint64(self.eos_every) == 0] = 0
        logprobs: dict[int, RowLogprobs] = {}
        if self._slots.special or step.matchers:
            for i, slot in enumerate(slots.tolist()):
                matcher = step.matchers.get(int(rows[i]))
                if slot in self._slots.special or matcher is not None:
                    position = int(last[i])
                    join = self._slots.joined(slot)
                    tokens[i] = token = self._next_token(join, position, int(digest[i]), matcher)
                    k = join.candidates or join.params.alternatives
                    if k is not None:
                        ids = join.params.logprob_token_ids
                        entry = self.logprob(token, position + 1, k, ids)
                        logprobs[int(rows[i])] = RowLogprobs.of([entry])
        self._slots.history[slots, last + 1] = tokens
        self._slots.known[slots] += 1
        return StepResult(tokens=tokens.tolist(), logprobs=logprobs, prompt_logprobs={})
