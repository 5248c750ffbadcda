"""`StrictRunner`: the fake model that reads every KV entry, and knows windows.

It is in plain Python: numpy takes a microsecond for each call, however few numbers it is given, and
a simulated step has three rows of thirty tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from asyncinfer.scheduler import Join, RowLogprobs, RunnerSpec, Step, StepResult
from asyncinfer.testing.fake_steps import FakeSteps
from asyncinfer.testing.oracle import MASK, A, WindowSum, added, fake_kv, mix, weight

__all__ = ["StrictPages", "StrictRunner"]


class StrictPages:
    """What one KV group stores: 64 bits for each token. New pages hold garbage."""

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
        self._windows = [group.window for group in spec.groups if group.window is not None]
        #: What each KV group stores.
        self.pages = [
            StrictPages(group.num_pages, spec.block_size, number)
            for number, group in enumerate(spec.groups)
        ]
        self._weights = [*map(weight, range(spec.max_context))]

    def _apply(self, plan: Step) -> None:
        slots = self._slots
        for slot in plan.leaves:
            assert slots[slot] is not None, f"slot {slot} leaves twice"
            slots[slot] = None
        for join in plan.joins:
            assert slots[join.slot] is None, f"slot {join.slot} is taken"
            assert 1 <= join.prompt_len <= len(join.token_ids) <= self._spec.max_context
            tables = [list(table) for table in join.tables]
            assert len(tables) == len(self.pages)
            slots[join.slot] = _Slot(join, list(join.token_ids), tables)
        for number, changes in enumerate(plan.groups):
            for slot, index, page in changes.grown:
                table = self._tenant(slot).tables[number]
                assert len(table) == index, f"slot {slot}: entry {index} set twice, or a gap"
                table.append(page)

    def _check(self, plan: Step) -> None:
        spec, rows = self._spec, len(plan.slots)
        assert rows, "an empty plan"
        assert len(plan.starts) == len(plan.counts) == len(plan.samples) == rows
        assert plan.tokens <= spec.max_step_tokens, "over the token budget"
        assert len(set(plan.slots)) == rows, "a slot twice"
        assert all(join.slot in plan.slots for join in plan.joins), "a join without a row"
        for number, start, count, draws in zip(
            plan.slots, plan.starts, plan.counts, plan.samples, strict=True
        ):
            slot, end = self._tenant(number), start + count
            known = len(slot.tokens)
            assert count >= 1
            assert start >= 0
            assert slot.computed in (None, start), "a row skips or repeats tokens"
            assert end <= known, "a row computes tokens nobody knows"
            assert draws == 0 or (draws == 1 and end == known), "a draw in the middle"
            assert known + draws <= spec.max_context, "beyond the context"
            for table in slot.tables:
                assert end <= len(table) * spec.block_size, "a block table too short"
        for number in range(len(spec.groups)):
            self._check_writes(plan, number)

    def _check_writes(self, plan: Step, group: int) -> None:
        """No page that a row writes is in any other table, as far as windows show it."""
        size, spec = self._spec.block_size, self._spec.groups[group]
        pages, window = spec.num_pages, spec.window
        starts = dict(zip(plan.slots, plan.starts, strict=True))
        users = Counter[int]()
        for number, slot in enumerate(self._slots):
            if slot is not None:
                reached = starts.get(number, slot.computed or 0)
                first = 0 if window is None else max(0, reached - window + 1) // size
                users.update(slot.tables[group][first:])
        for number, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            table = self._tenant(number).tables[group]
            for page in table[start // size : -(-(start + count) // size)]:
                what = f"slot {number} writes page {page} of group {group}"
                assert 0 <= page < pages, f"{what}, which there is not"
                assert users[page] == 1, f"{what}, which is shared"

    def _compute(self, plan: Step) -> StepResult:
        for pages, changes in zip(self.pages, plan.groups, strict=False):
            pages.copy(changes.copies)
        self._check(plan)
        rows = [
            (self._tenant(slot), start, count)
            for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True)
        ]
        # Every read comes before every write: a page another row writes in this step is stale.
        states = [self._read(slot, start) for slot, start, _ in rows]
        result = StepResult(tokens=[], logprobs={}, prompt_logprobs={})
        for row, (slot, start, count) in enumerate(rows):
            digest = self._write(slot, start, count, *states[row])
            slot.computed = start + count
            if plan.samples[row]:
                token = self._next_token(slot.join, start + count - 1, digest)
                slot.tokens.append(token)
                result.tokens.append(token)
                alternatives = slot.join.params.logprobs
                if alternatives is not None:
                    entry = self.logprob(token, start + count, alternatives)
                    result.logprobs[row] = RowLogprobs.of([entry])  # type: ignore[index]
        for row, alternatives in plan.prompt_logprobs.items():
            slot, start, count = rows[row]
            end = min(start + count + 1, slot.join.prompt_len)
            scored = slot.tokens[start + 1 : end]
            result.prompt_logprobs[row] = self._score(scored, start + 1, alternatives)  # type: ignore[index]
        return result

    def _read(self, slot: _Slot, start: int) -> tuple[int, int, list[WindowSum]]:
        """KV, digest and windows before `start`, from every entry."""
        windows = [
            WindowSum(window, start, self._entries(slot, number, max(0, start - window + 1), start))
            for number, window in enumerate(self._windows, 1)
        ]
        if not start:
            return 0, 0, windows
        entries = self._entries(slot, 0, 0, start)
        return entries[-1], sum(map(mul, entries, self._weights)) & MASK, windows

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
        self, slot: _Slot, start: int, count: int, kv: int, digest: int, windows: list[WindowSum]
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
                pages_of.entries[table[position // size]][position % size] = entry
            digest += stored[0] * weights[position]
        return digest & MASK

    def _spoil(self, plan: Step, row: int) -> None:
        slot, size, start = self._tenant(plan.slots[row]), self._spec.block_size, plan.starts[row]
        for pages, table in zip(self.pages, slot.tables, strict=True):
            for position in range(start, start + plan.counts[row]):
                pages.entries[table[position // size]][position % size] = pages.garbage()

    def _tenant(self, slot: int) -> _Slot:
        tenant = self._slots[slot]
        assert tenant is not None, f"slot {slot} is empty"
        return tenant
