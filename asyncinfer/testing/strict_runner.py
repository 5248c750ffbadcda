"""`StrictRunner`: the fake model that reads every KV entry, and knows windows and states.

It is in plain Python: numpy takes a microsecond for each call, however few numbers it is given, and
a simulated step has three rows of thirty tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import TYPE_CHECKING, Any

from asyncinfer.grammar import Matcher
from asyncinfer.scheduler import Join, RowLogprobs, RunnerSpec, Step, StepResult
from asyncinfer.testing.fake_steps import FakeSteps
from asyncinfer.testing.oracle import (
    MASK,
    STATE,
    A,
    RunningHash,
    Seen,
    WindowSum,
    added,
    fake_kv,
    guided,
    mix,
    weight,
    windows_of,
)

if TYPE_CHECKING:
    from asyncinfer.testing.sampled_rows import SampledRows

__all__ = ["StrictPages", "StrictRunner"]


class StrictPages:
    """What one KV group stores: 64 bits for each token, or for each block with `size` 1. New pages
    hold garbage."""

    def __init__(self, count: int, size: int, group: int) -> None:
        self._size = size
        self._group = group
        self._poisoned = 0
        #: By page; a page is changed in place.
        self.entries: list[list[int]] = [[] for _ in range(count)]
        self.poison(range(count))

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages with garbage, so that whoever still reads them shows it."""
        for page in pages:
            self.entries[page] = [self.garbage()] * self._size

    def page(self, page: int) -> list[int]:
        """The entries of a page."""
        return self.entries[page]

    def store(self, page: int, position: int, entry: int) -> None:
        """The entry of the token at `position`; in place of the one before it for states."""
        self.entries[page][position % self._size] = entry

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.entries[target] = self.entries[source].copy()

    def garbage(self) -> int:
        """Numbers that no other group has."""
        self._poisoned += 1
        return mix((self._poisoned - (self._group << 48)) & MASK)


@dataclass(slots=True)
class _Slot:
    join: Join
    #: Every token known, those just drawn included.
    tokens: list[int]
    #: The block table of each KV group.
    tables: list[list[int]]
    #: Tokens in the KV cache; None until the first step tells.
    computed: int | None = None
    #: How many of the last ones may not stand: drafts, after which tokens may follow that were not
    #: drawn.
    unsure: int = 0
    #: The states after each drafted token of the last row, by how many tokens the sequence has then
    #: and by group.
    aside: dict[int, dict[int, int]] = field(default_factory=dict)


class StrictRunner(FakeSteps):
    """A `StepRunner` over hashes instead of tensors, for few and short rows: see
    `asyncinfer.testing.oracle`.

    Every KV entry of every row is read through its block table, and no row may write a page that
    the table of another slot has.
    """

    def __init__(self, spec: RunnerSpec, **options: Any) -> None:
        """`options` are those of `FakeSteps`."""
        super().__init__(spec, **options)
        self._slots: list[_Slot | None] = [None] * spec.max_slots
        self._windows = windows_of(spec.groups)
        #: Numbers of the groups with a state.
        self._states = [number for number, group in enumerate(spec.groups) if group.state]
        #: What each KV group stores.
        self.pages = [
            StrictPages(group.num_pages, 1 if group.state else spec.block_size, number)
            for number, group in enumerate(spec.groups)
        ]
        self._weights = [*map(weight, range(spec.max_context))]
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
            slots[join.slot] = _Slot(join, list(join.token_ids), tables)
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
        # Every read comes before every write: a page another row writes in this step is stale.
        states = [self._read(slot, start) for slot, start, _ in rows]
        result = StepResult(tokens=[], logprobs={}, prompt_logprobs={})
        drawn: dict[int, list[int]] = {}
        digests: list[int] = []
        for row, (slot, start, count) in enumerate(rows):
            draft = step.drafts.get(row, ())
            slot.aside.clear()
            digests.append(self._write(slot, start, count - len(draft), *states[row]))
            slot.computed = start + count
        for row, (slot, _, _) in enumerate(rows):
            if step.samples[row] and row not in drawn:
                digest, draft = digests[row], step.drafts.get(row, ())
                guide, scale = step.guided.get(row, (-1, 1.0))
                if guide >= 0:
                    digest = guided(digest, digests[guide], scale)
                drawn[row] = self._draw(slot, draft, digest, step.matchers.get(row))
                if guide >= 0:
                    drawn[guide] = [*drawn[row]]
        if self.samplers is not None:
            result.failed = self._sample(step, drawn)
        for row, draws in drawn.items():
            slot = rows[row][0]
            self._go_on(slot, step.drafts.get(row, ()), draws)
            result.tokens += draws
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

    def _draw(
        self, slot: _Slot, draft: Sequence[int], digest: int, matcher: Matcher | None
    ) -> list[int]:
        """The draws of a row whose tokens before the draft are written; writes those of the
        draft."""
        known = len(slot.tokens)
        slot.tokens += draft
        draws: list[int] = []
        for drafted in range(1 + len(draft)):
            position = known + drafted - 1
            if drafted:
                digest = self._write(slot, position, 1, *self._read(slot, position))
            if draft and self._states:
                slot.aside[position + 1] = {
                    number: self._state(slot, number, position + 1) for number in self._states
                }
            draws.append(self._next_token(slot.join, position, digest, matcher, draft[:drafted]))
        return draws

    def _go_on(self, slot: _Slot, draft: Sequence[int], draws: list[int]) -> None:
        """The slot goes on by what was drawn up to the first drafted token that was not."""
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

    def _read(self, slot: _Slot, start: int) -> tuple[int, int, list[Seen]]:
        """KV, digest and windows before `start`, from every entry."""
        windows: list[Seen] = []
        for number, window in enumerate(self._windows, 1):
            if window == STATE:
                windows.append(RunningHash(self._state(slot, number, start)))
                continue
            entries = self._entries(slot, number, max(0, start - window + 1), start)
            windows.append(WindowSum(window, start, entries))
        if not start:
            return self._adapter(slot.join), 0, windows
        entries = self._entries(slot, 0, 0, start)
        return entries[-1], sum(map(mul, entries, self._weights)) & MASK, windows

    def _state(self, slot: _Slot, group: int, tokens: int) -> int:
        """A group's state after so many tokens, as far as its page has it."""
        if not tokens:
            return 0
        page = slot.tables[group][(tokens - 1) // self._spec.block_size]
        assert page >= 0, f"slot {slot.join.slot} lacks a page of group {group}"
        return self.pages[group].entries[page][0]

    def _entries(self, slot: _Slot, group: int, start: int, end: int) -> list[int]:
        """What a group has stored of the tokens from `start` to `end`."""
        size, pages = self._spec.block_size, self.pages[group].entries
        found: list[int] = []
        for page in slot.tables[group][start // size : -(-end // size)]:
            assert page >= 0, f"slot {slot.join.slot} lacks a page of group {group}"
            found += pages[page]
        skipped = start % size
        return found[skipped : skipped + end - start]

    def _write(
        self, slot: _Slot, start: int, count: int, kv: int, digest: int, windows: list[Seen]
    ) -> int:
        """Store what the groups have of a row; the digest of its last token."""
        size, weights, tokens = self._spec.block_size, self._weights, slot.tokens
        if not windows:
            pages, table = self.pages[0].entries, slot.tables[0]
            for position in range(start, start + count):
                kv = (kv * A + added(tokens[position])) & MASK
                pages[table[position // size]][position % size] = kv
                digest += kv * weights[position]
            return digest & MASK
        row = fake_kv(tokens[start : start + count], windows, kv)
        for position, stored in enumerate(row, start):
            for pages_of, table, entry in zip(self.pages, slot.tables, stored, strict=True):
                pages_of.store(table[position // size], position, entry)
            digest += stored[0] * weights[position]
        return digest & MASK

    def _spoil(self, step: Step, row: int) -> None:
        slot, size, start = self._held(step.slots[row]), self._spec.block_size, step.starts[row]
        for pages, table in zip(self.pages, slot.tables, strict=True):
            for position in range(start, start + step.counts[row]):
                pages.store(table[position // size], position, pages.garbage())

    def _held(self, slot: int) -> _Slot:
        held = self._slots[slot]
        assert held is not None, f"slot {slot} is empty"
        return held
