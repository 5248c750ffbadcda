"""`StrictRunner`: the fake model that reads every KV entry, and knows windows and states.

It is in plain Python: numpy takes a microsecond for each call, however few numbers it is given, and
a simulated step has three rows of thirty tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncinfer.scheduler import RowLogprobs, RunnerSpec, Step, StepResult
from asyncinfer.testing.fake_steps import FakeSteps
from asyncinfer.testing.oracle import guided, mix
from asyncinfer.testing.strict_kv import StrictKV, StrictSlot

if TYPE_CHECKING:
    from asyncinfer.testing.sampled_rows import SampledRows

__all__ = ["StrictRunner"]


class StrictRunner(FakeSteps):
    """A `StepRunner` over hashes instead of tensors, for few and short rows: see
    `asyncinfer.testing.oracle`.

    Every KV entry of every row is read through its block table, and no row may write a page that
    the table of another slot has.
    """

    def __init__(self, spec: RunnerSpec, **options: Any) -> None:
        """`options` are those of `FakeSteps`."""
        super().__init__(spec, **options)
        self._slots: list[StrictSlot | None] = [None] * spec.max_slots
        #: Numbers of the groups with a state.
        self._states = [number for number, group in enumerate(spec.groups) if group.state]
        self._kv = StrictKV(spec)
        #: What each KV group stores.
        self.pages = self._kv.pages
        #: Sampler plugins; None: it runs none.
        self.samplers: SampledRows | None = None

    def _apply(self, step: Step) -> None:
        slots = self._slots
        for slot in step.leaves:
            assert slots[slot] is not None, f"slot {slot} leaves twice"
            slots[slot] = None
            if self.samplers is not None:
                self.samplers.leave(slot)
        for join in step.joins:
            assert slots[join.slot] is None, f"slot {join.slot} is taken"
            assert 1 <= join.prompt_len <= len(join.token_ids) <= self._spec.max_context
            tables = [list(table) for table in join.tables]
            assert len(tables) == len(self.pages)
            slots[join.slot] = StrictSlot(join, list(join.token_ids), tables)
            if join.samplers:
                assert self.samplers is not None, "samplers for a runner that has none"
                self.samplers.join(join)
        for forced in step.forced:
            tenant = self._held(forced.slot)
            known = len(tenant.tokens)
            fits = known - tenant.unsure <= forced.start <= known
            assert fits, f"slot {forced.slot}: forced tokens after a gap"
            tenant.tokens[forced.start :] = forced.token_ids
        for number, changes in enumerate(step.groups):
            for slot, index, page in changes.grown:
                table = self._held(slot).tables[number]
                assert len(table) == index, f"slot {slot}: entry {index} set twice, or a gap"
                table.append(page)
            for slot, tokens in changes.rewound:
                tenant = self._held(slot)
                assert tokens in tenant.aside, f"slot {slot}: no state after {tokens} tokens"
                page = tenant.tables[number][(tokens - 1) // self._spec.block_size]
                self.pages[number].store(page, tokens - 1, tenant.aside[tokens][number])

    def _check(self, step: Step) -> None:
        spec, rows = self._spec, len(step.slots)
        assert rows, "an empty step"
        assert len(step.starts) == len(step.counts) == len(step.samples) == rows
        assert step.tokens <= spec.max_step_tokens, "over the token budget"
        assert len(set(step.slots)) == rows, "a slot twice"
        for join in step.joins:
            assert join.slot in step.slots or join.paired, "a join without a row"
        assert all(step.drafts.values()), "a draft of nothing"
        for row, (number, start, count, draws) in enumerate(
            zip(step.slots, step.starts, step.counts, step.samples, strict=True)
        ):
            slot, end = self._held(number), start + count
            drafted = len(step.drafts.get(row, ()))
            if slot.unsure and slot.computed is not None:
                assert slot.computed - slot.unsure <= start <= slot.computed, "a row skips tokens"
                slot.computed, slot.unsure = start, 0
                if draws:
                    del slot.tokens[end - drafted :]
            known = len(slot.tokens)
            assert count >= 1
            assert start >= 0
            assert slot.computed in (None, start), "a row skips or repeats tokens"
            assert end <= known + drafted, "a row computes tokens nobody knows"
            assert draws == 0 or end == known + drafted, "a draw in the middle"
            assert draws in (0, 1 + drafted), "not a draw for each token of a draft"
            assert draws or not drafted, "a draft, and nothing is drawn"
            assert known + draws <= spec.max_context, "beyond the context"
            for table in slot.tables:
                assert end <= len(table) * spec.block_size, "a block table too short"
        for number in range(len(spec.groups)):
            self._check_writes(step, number)

    def _check_writes(self, step: Step, group: int) -> None:
        """No page that a row writes is in any other table, as far as windows show it."""
        size, spec = self._spec.block_size, self._spec.groups[group]
        pages, window = spec.num_pages, spec.window
        starts = dict(zip(step.slots, step.starts, strict=True))
        used: list[int] = []
        for number, slot in enumerate(self._slots):
            if slot is not None and window is None:
                used += slot.tables[group]
            elif slot is not None and window is not None:
                reached = starts.get(number, slot.computed or 0)
                used += slot.tables[group][max(0, reached - window + 1) // size :]
        for number, start, count in zip(step.slots, step.starts, step.counts, strict=True):
            table = self._held(number).tables[group]
            for page in table[start // size : -(-(start + count) // size)]:
                # Tables are short: to count one page is cheaper than to count all.
                if not 0 <= page < pages or used.count(page) != 1:
                    what = f"slot {number} writes page {page} of group {group}"
                    assert 0 <= page < pages, f"{what}, which there is not"
                    raise AssertionError(f"{what}, which is shared")

    def _compute(self, step: Step) -> StepResult:
        for pages, changes in zip(self.pages, step.groups, strict=False):
            pages.copy(changes.copies)
        self._check(step)
        rows = [
            (self._held(slot), start, count)
            for slot, start, count in zip(step.slots, step.starts, step.counts, strict=True)
        ]
        # All rows are read before any is written: pages that rows write in this step are stale.
        states = [self._kv.read(slot, start, self._adapter(slot.join)) for slot, start, _ in rows]
        result = StepResult(tokens=[], logprobs={}, prompt_logprobs={})
        drawn: dict[int, list[int]] = {}
        #: For each row, the digests after all known tokens and after each drafted one.
        digests: list[list[int]] = []
        for row, (slot, start, count) in enumerate(rows):
            draft = step.drafts.get(row, ())
            slot.aside.clear()
            digest = self._kv.write(slot, start, count - len(draft), *states[row])
            digests.append([digest, *self._write_draft(slot, draft)])
            slot.computed = start + count
        for row, (slot, _, _) in enumerate(rows):
            if step.samples[row] and row not in drawn:
                found, draft = digests[row], step.drafts.get(row, ())
                guide, scale = step.guided.get(row, (-1, 1.0))
                if guide >= 0:
                    assert draft == step.drafts.get(guide, ()), "a pair verifies one draft"
                    pairs = zip(found, digests[guide], strict=True)
                    found = [guided(one, other, scale) for one, other in pairs]
                first, matcher = step.first_draw(row) - 1, step.matchers.get(row)
                drawn[row] = [
                    self._next_token(slot.join, first + after, digest, matcher, draft[:after])
                    for after, digest in enumerate(found)
                ]
                if guide >= 0:
                    drawn[guide] = [*drawn[row]]
        if self.samplers is not None:
            result.failed = self._sample(step, drawn)
        for row, draws in drawn.items():
            slot = rows[row][0]
            right = self._go_on(slot, step.drafts.get(row, ()), draws)
            result.tokens += draws
            if row in step.predicts:
                first = step.first_draw(row) + right + 1
                predicted = first, self._predicted(slot, first, step.predicts[row])
                result.predicted[row] = predicted  # type: ignore[index]
            alternatives = slot.join.candidates or slot.join.params.alternatives
            if alternatives is not None:
                ids = slot.join.params.logprob_token_ids
                first = step.first_draw(row)
                entries = [
                    self.logprob(token, position, alternatives, ids)
                    for position, token in enumerate(draws, first)
                ]
                result.logprobs[row] = RowLogprobs.of(entries)  # type: ignore[index]
        for row, alternatives in step.prompt_logprobs.items():
            slot, start, count = rows[row]
            end = min(start + count + 1, slot.join.prompt_len)
            scored = slot.tokens[start + 1 : end]
            result.prompt_logprobs[row] = self._score(scored, start + 1, alternatives)  # type: ignore[index]
        return result

    def _write_draft(self, slot: StrictSlot, draft: Sequence[int]) -> list[int]:
        """Write a draft after all known tokens, and keep states. Returns each digest."""
        digests: list[int] = []
        known = len(slot.tokens)
        slot.tokens += draft
        for position in range(known, known + len(draft)):
            self._keep_states(slot, position)
            read = self._kv.read(slot, position, self._adapter(slot.join))
            digests.append(self._kv.write(slot, position, 1, *read))
        if draft:
            self._keep_states(slot, len(slot.tokens))
        return digests

    def _keep_states(self, slot: StrictSlot, tokens: int) -> None:
        if self._states:
            slot.aside[tokens] = {
                number: self._kv.state(slot, number, tokens) for number in self._states
            }

    def _go_on(self, slot: StrictSlot, draft: Sequence[int], draws: list[int]) -> int:
        """Advance the slot by the draws up to the first one that differs from the draft. Returns
        how many came before it."""
        known = len(slot.tokens) - len(draft)
        right = 0
        while right < len(draft) and draft[right] == draws[right]:
            right += 1
        steered = slot.join.masked or slot.join.params.thinking_budget is not None
        if steered and draft:
            # Tokens that have to follow one that was drawn stand though they were not drawn.
            slot.unsure = len(draft)
            slot.tokens[known:] = draws
        else:
            slot.tokens[known:] = draws[: right + 1]
            slot.computed = known + right
        return right

    def _predicted(self, slot: StrictSlot, position: int, count: int) -> list[int]:
        """The tokens that will be drawn from a position on, except that every fourth is wrong, and
        the ones after it continue from the wrong token."""
        known, join = slot.tokens[:position], slot.join
        for at in range(position, min(position + count, self._spec.max_context)):
            (token,) = self.oracle(known, join.params, join.seed, 1)
            wrong = not mix(join.seed ^ mix(at)) % 4
            known.append(1 + token % (self._spec.vocab_size - 1) if wrong else token)
        return known[position:]

    def _sample(
        self, step: Step, drawn: dict[int, list[int]], *, stands: bool = True
    ) -> dict[int, Exception]:
        """Have sampler plugins change what rows drew; the rows of which the first draw failed. None
        of their requests may have a draft, unless its samplers are sound."""
        assert self.samplers is not None
        draws = [
            (row, step.slots[row], number)
            for row, tokens in drawn.items()
            if self._held(step.slots[row]).join.samplers
            for number in range(len(tokens))
        ]
        if not draws:
            return {}
        tokens, failed = self.samplers.draw(
            [slot for _, slot, _ in draws],
            [step.first_draw(row) + number for row, _, number in draws],
            [drawn[row][number] for row, _, number in draws],
            stands=stands,
        )
        for (row, _, number), token in zip(draws, tokens, strict=True):
            drawn[row][number] = token
        assert not any(draws[index][2] for index in failed), "a draft, and its sampler fails"
        return {draws[index][0]: error for index, error in failed.items()}

    def _lack(self, step: Step) -> None:
        """The lack shows after the plugins were called."""
        if self.samplers is not None:
            drawn = {row: [1] * draws for row, draws in enumerate(step.samples) if draws}
            self._sample(step, drawn, stands=False)

    def _spoil(self, step: Step, row: int) -> None:
        slot, size, start = self._held(step.slots[row]), self._spec.block_size, step.starts[row]
        for pages, table in zip(self.pages, slot.tables, strict=True):
            for position in range(start, start + step.counts[row]):
                pages.store(table[position // size], position, pages.garbage())

    def _held(self, slot: int) -> StrictSlot:
        held = self._slots[slot]
        assert held is not None, f"slot {slot} is empty"
        return held
