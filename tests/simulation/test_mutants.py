"""A test of the tests: every planted bug must be caught by the invariants or the oracle."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from asyncinfer.cache import (
    BlockHasher,
    BlockManager,
    FullPages,
    GuardedPolicy,
    PagePool,
    PrefixCache,
    WindowPages,
)
from asyncinfer.cache import prefix_cache as prefix_cache_module
from asyncinfer.scheduler import Step
from asyncinfer.scheduler.admitter import Admitter
from asyncinfer.scheduler.committer import Committer
from asyncinfer.scheduler.inflight_prefixes import InflightPrefixes
from asyncinfer.scheduler.planner import Planner
from asyncinfer.scheduler.queue import WaitingQueue
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.slot_allocator import SlotAllocator
from asyncinfer.testing.scenarios import simulate_scheduler

SEEDS = 80


def edit(owner: type, method: str, before: str, after: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutant that replaces one piece of a method's source."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        function = owner.__dict__[method]
        if isinstance(function, property):
            function = function.fget
        assert isinstance(function, FunctionType)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(before) == 1, f"{owner.__name__}.{method} holds no single {before!r}"
        names: dict[str, Any] = {}
        exec(source.replace(before, after), function.__globals__, names)
        monkeypatch.setattr(owner, method, names[method])

    return plant


def collide(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = BlockHasher.digest
    monkeypatch.setattr(BlockHasher, "digest", lambda *args: bytes([digest(*args)[0] & 3]))


def no_token_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    collide(monkeypatch)
    edit(PrefixCache, "_holds", "entry.data != data", "False")(monkeypatch)


def no_chain_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    collide(monkeypatch)
    monkeypatch.setattr(prefix_cache_module, "_same", lambda a, b: True)


def scope_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    root = BlockHasher.root
    monkeypatch.setattr(BlockHasher, "root", lambda self, scope, adapter: root(self, "", ""))
    monkeypatch.setattr(prefix_cache_module, "_same", lambda a, b: True)


MUTANTS = {
    # The cache.
    "published before the step is committed": edit(
        Admitter,
        "_seat",
        "return chunk",
        "self._blocks.commit(sequence, min(sequence.computed, len(sequence.tokens))); return chunk",
    ),
    "published though the row failed": edit(
        Committer,
        "_commit_row",
        "if error is not None:",
        "if error is not None:\n            sequence.committed += step.counts[row]\n"
        "            self._publish(sequence)",
    ),
    "published half full": edit(
        BlockManager, "commit", "length // size\n", "-(-length // size) if length > 9 else 0\n"
    ),
    "a reference is not given back": edit(
        BlockManager, "close", "reversed(table.live)", "table.live[1:]"
    ),
    "a hit takes no reference": edit(FullPages, "hold", "refs[page] += 1", "pass"),
    "a block is freed twice": edit(
        PagePool, "put", "self.free.append(page)", "self.free += [page] * (1 + (page == 3))"
    ),
    "a cached block is freed as well": edit(
        FullPages,
        "release",
        "self._cache is None or not self._cache.release(page)",
        "self._cache is None or not self._cache.release(page) or page == 1",
    ),
    "evicted, but still found": edit(PrefixCache, "evict", "del self.by_key[entry.key]", "pass"),
    "a reused block stays evictable": edit(
        GuardedPolicy, "reused", "self.evictable.pop(number, None)", "pass"
    ),
    "tokens are not compared": no_token_compare,
    "the tokens before are not compared": no_chain_compare,
    "scopes share": scope_ignored,
    # Answers that share a prompt.
    "a shared tail is not copied": edit(
        SlotAllocator, "seat_fork", "changes.copies.append(copy)", "pass"
    ),
    "a shared tail is copied backwards": edit(
        SlotAllocator,
        "seat_fork",
        "changes.copies.append(copy)",
        "changes.copies.append(copy[::-1])",
    ),
    "a tail is shared, not copied": edit(
        BlockManager,
        "fork",
        "if not partial:\n        return []",
        "for table, page in zip(sequence.tables, sources):\n        table.pages.append(page)\n"
        "    sequence.capacity += bool(partial) * self.block_size\n"
        "    return []",
    ),
    "the source of a copy is not pinned": edit(
        BlockManager, "fork", "group.hold(sources[-1:])", "pass"
    ),
    "a pin is never released": edit(SlotAllocator, "unpin", "group.release(source)", "pass"),
    "shared before it is computed": edit(
        Admitter, "_fork_wait", "leader.committed >= shared", "leader.computed >= 1"
    ),
    "shared with one that was preempted meanwhile": edit(
        Admitter, "admit", "sequence.fork_of.slot < 0", "sequence.fork_of.slot < -1"
    ),
    # Steps in flight.
    "freed in flight at the end": edit(
        SequenceStates, "finish", "if sequence.in_flight:", "if False:"
    ),
    "freed in flight by preemption": edit(
        SequenceStates,
        "preempt",
        "if not sequence.in_flight:",
        "sequence.in_flight = 0\n    if True:",
    ),
    "a token is delivered after the end": edit(
        Committer, "_commit_row", "if sequence.state is not FINISHED:", "if True:"
    ),
    "too many draws": edit(Step, "add_chunk", "sequence.draws_left -= draws", "pass"),
    # The scheduler.
    "a retracted draw is not drawn again": edit(
        Step, "take_back", "sequence.draws_left += draws", "pass"
    ),
    "a retracted chunk counts as computed": edit(
        Step, "take_back", "sequence.computed -= count", "pass"
    ),
    "nothing is left to compute after a full hit": edit(
        Admitter, "_reusable", "len(sequence.tokens) - 1", "len(sequence.tokens)"
    ),
    "prompt logprobs lost to a prefix hit": edit(
        Admitter, "_reusable", "limit = min(limit, sequence.scored)", "pass"
    ),
    "prompt logprobs twice after a preemption": edit(
        Step, "add_chunk", "sequence.scored <= start < ", "start < "
    ),
    "the runner is not told of a block": edit(
        SlotAllocator,
        "grow",
        "range(first, first + count)",
        "range(first + first % 3 // 2, first + count)",
    ),
    "the runner is not told who left": edit(
        SlotAllocator, "vacate", "self._leaves.append(slot)", "pass"
    ),
    "the answer so far is forgotten": edit(
        SlotAllocator, "join", "list(sequence.tokens)", "sequence.tokens[: sequence.prompt_len]"
    ),
    "a hit counts one token too many": edit(
        SlotAllocator, "seat", "= sequence.capacity", "= sequence.capacity + bool(entries)"
    ),
    "followers are forgotten": edit(
        InflightPrefixes, "dissolve", "return self._release(leader, None)", "return []"
    ),
    "a resumed sequence is lost": edit(SequenceStates, "resume", "self.wait(sequence)", "pass"),
    "a removed sequence is admitted": edit(WaitingQueue, "remove", "place.sequence = None", "pass"),
    # Window pages.
    "a page that is seen is given back": edit(
        WindowPages, "first", "max(0, position - self.window + 1)", "position"
    ),
    "a page is given back one token early": edit(
        WindowPages, "first", "position - self.window + 1", "position - self.window + 2"
    ),
    "pages are never given back": edit(
        Committer, "_publish", "self._blocks.trim(sequence, sequence.committed)", "pass"
    ),
    "pages are given back for what is in flight": edit(
        Committer,
        "_publish",
        "blocks.trim(sequence, sequence.committed)",
        "blocks.trim(sequence, sequence.computed)",
    ),
    "a hit takes no reference to its pages": edit(WindowPages, "hold", "refs[page] += 1", "pass"),
    "a hit that one of two windows cannot serve": edit(
        BlockManager, "match", "before != len(entries)", "before < 0"
    ),
    "a hit without the pages it sees": edit(
        WindowPages, "usable", "run >= min(self.reach, count)", "True"
    ),
    "a hit sees one page too few": edit(
        WindowPages, "usable", "run >= min(self.reach, count)", "run >= min(self.reach - 1, count)"
    ),
    "a page outlives its block": edit(
        BlockManager,
        "grow",
        "other.drop(block)",
        "pass",
    ),
    "a page in use is taken again": edit(
        WindowPages, "hold", "self.unused.pop(page, None)", "pass"
    ),
    "a kept page is free as well": edit(
        WindowPages,
        "release",
        "if page not in self.keeper:",
        "if page not in self.keeper or page == 1:",
    ),
    "a page of another block is kept": edit(
        BlockManager, "commit", "table.pages[j], again", "table.pages[-1], again"
    ),
    "a copied tail lacks its window page": edit(
        SlotAllocator, "seat_fork", "zip(self._changes, copies", "zip(self._changes[:1], copies"
    ),
    "the source of a copied page is not pinned": edit(
        BlockManager,
        "fork",
        "group.hold(sources[-1:])",
        "group is not self.groups[0] or group.hold(sources)",
    ),
    "a pinned page is never released": edit(
        SlotAllocator,
        "unpin",
        "group.release(source)",
        "group is not self.blocks.groups[0] or group.release(source)",
    ),
    "shared with one that sees the prompt no more": edit(
        BlockManager,
        "can_fork",
        "parent.tables[index].first_live_page <= group.first(length)",
        "True",
    ),
    "the runner is not told of a page": edit(
        SlotAllocator,
        "grow",
        "changes.grown.append",
        "changes is not self._changes[0] and index % 3 == 2 or changes.grown.append",
    ),
    "pages of an ended sequence are lost": edit(
        BlockManager,
        "close",
        "group.release(page)",
        "group is not self.groups[0] and page == 2 or group.release(page)",
    ),
    "more blocks than there are pages for": edit(
        BlockManager,
        "available",
        "min([group.available for group in self.groups])",
        "self.groups[0].available",
    ),
    "admitted without room for its pages": edit(
        Admitter, "_fit", "max(lacking) <= 0", "lacking[0] <= 0"
    ),
    "a needy sequence is starved": edit(Planner, "_relieve", "return served", "return served[1:]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    for seed in range(SEEDS):
        try:
            simulate_scheduler(seed)
        except Exception:
            return
    pytest.fail(f"survived {SEEDS} seeds: {mutant}")
