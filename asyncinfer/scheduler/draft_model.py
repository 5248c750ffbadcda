"""`DraftModel`: a small model that draws ahead of the large one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from asyncinfer.cache import BlockManager, BlockTable, CacheEntry, Namespace, PrefixCache
from asyncinfer.params import SamplingParams
from asyncinfer.protocols import DraftRequest
from asyncinfer.scheduler.step import Join, Step
from asyncinfer.scheduler.step_runner import StepRunner

__all__ = ["DraftModel"]


@dataclass(slots=True)
class _Cached:
    """What the draft model keeps of an answer between two drafts. The block manager treats it like
    a sequence, as a `Tabled`."""

    params: SamplingParams
    namespace: Namespace
    #: Its pages, and its blocks in the prefix cache. `BlockManager` writes these.
    tables: list[BlockTable] = field(default_factory=list)
    capacity: int = 0
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    node: CacheEntry | Namespace | None = None
    conversation: None = None
    #: Tokens whose KV is in its pages.
    computed: int = 0
    #: The answer's tokens, prompt included, at its last draft. An array is cheap to copy.
    tokens: array[int] = field(default_factory=lambda: array("i"))
    #: The tokens that the model drew after those.
    drawn: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _DraftRow:
    """One answer in the draft that is made now."""

    request: DraftRequest
    cached: _Cached
    #: Known tokens without KV that this draft computes.
    count: int
    #: Tokens to draw after those; 0 where the draft cannot compute all known tokens.
    draws: int


class DraftModel:
    """A proposer that draws from a model of its own (speculative decoding, Leviathan et al., 2023).
    It draws with the random numbers of the answer, those of its seed and position. The two models
    then draw the same token far more often than with numbers of their own.

    It draws by the request's sampling options alone, without grammar, plugins and adapters.

    Its KV has pages of its own, with a prefix cache. An answer has pages for all of its tokens or
    for none. When pages run out, the answer whose last draft is oldest loses its pages. The next
    draft drops wrong guesses. A draft computes at most `max_step_tokens` known tokens: a long
    prompt is read in parts, between steps of the large model. An answer waits for a prefix that
    another answer is reading.
    """

    name: Final = "draft-model"

    def __init__(self, runner: StepRunner, cache: PrefixCache | None = None) -> None:
        """The draft model owns `runner`, which has one KV group, and `cache`, made for the runner's
        `block_size`; None computes every prompt."""
        assert len(runner.spec.groups) == 1, "one table for each answer"
        self._runner = runner
        self.cache: Final = cache
        self._spec = runner.spec
        self._blocks = BlockManager.of(runner.spec.groups, runner.spec.block_size, cache)
        #: By answer, in the order of their last drafts.
        self._cached: dict[DraftRequest, _Cached] = {}
        #: How many slots the last draft used, from 0 on. The next draft frees them.
        self._taken = 0
        self._steps = 0
        #: Whether the last draft computed more than the tokens that answers had gained.
        self.read_prompts = False
        #: The answers for which the last draft was computed but gave no tokens, or for which there
        #: was no room.
        self.failed: set[DraftRequest] = set()

    @property
    def pages_free(self) -> int:
        """Pages that no answer has, those of the prefix cache included."""
        return self._blocks.available

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """The draft of each answer; empty where its prompt is still being read, or no page is
        left."""
        self.read_prompts = False
        self.failed = set()
        asked = set(requests)
        rows: list[_DraftRow] = []
        reading: set[bytes] = set()
        budget = self._spec.max_step_tokens
        for request in requests:
            if budget and len(rows) < self._spec.max_slots:
                row = self._row(request, budget, asked, reading)
                if row is not None:
                    rows.append(row)
                    budget -= row.count
        drafts = self._draw(rows) if rows else {}
        return [drafts.get(request, ()) for request in requests]

    def end(self, request: DraftRequest) -> None:
        """Take back the pages of an answer that has ended, or that waits for a place."""
        cached = self._cached.pop(request, None)
        if cached is not None and cached.tables:
            self._blocks.close(cached)

    def close(self) -> None:
        """Give the model's memory back."""
        self._runner.close()

    def _row(
        self, request: DraftRequest, budget: int, asked: set[DraftRequest], reading: set[bytes]
    ) -> _DraftRow | None:
        """The answer's row, with pages for it; None if there is no room, or if another row computes
        its next block. `reading`: keys of the blocks that rows compute."""
        known = request.length
        draws = min(request.most, self._spec.max_context - known)
        if draws < 1:
            # It has outgrown the draft model for good.
            self.end(request)
            self.failed.add(request)
            return None
        cached = self._cached.pop(request, None) or _Cached(
            _drawn_by(request.params), (request.scope, "")
        )
        self._cached[request] = cached
        before, drawn = len(cached.tokens), cached.drawn
        new = request.tokens(before)
        cached.tokens.extend(new)
        if cached.tables:
            right = 0
            while right < min(len(new), len(drawn)) and new[right] == drawn[right]:
                right += 1
            cached.computed = min(cached.computed, before + right, known - 1)
        else:
            self._blocks.open(cached, self._blocks.search(cached, known - 1))
            cached.computed = cached.capacity
        next_key = self._next_key(cached)
        if not reading.isdisjoint(next_key):
            self._blocks.close(cached)
            return None
        if not self._grow(cached, known + draws - 1, asked):
            self.end(request)
            self.failed.add(request)
            return None
        reading.update(next_key)
        missing = known - cached.computed
        # The last drafted token and the token that the answer then drew have no KV yet.
        self.read_prompts |= missing > 1 + len(drawn)
        cached.drawn = []
        return _DraftRow(request, cached, min(missing, budget), draws if missing <= budget else 0)

    def _next_key(self, cached: _Cached) -> list[bytes]:
        """The key of the first full block that is not in the prefix cache, if there is one."""
        first = cached.published
        self._blocks.hash(cached, min(first + 1, (len(cached.tokens) - 1) // self._spec.block_size))
        return cached.keys[first : first + 1]

    def _grow(self, cached: _Cached, tokens: int, asked: set[DraftRequest]) -> bool:
        """Give an answer pages for so many tokens, taken from answers that are not in `asked` if
        need be."""
        missing = self._blocks.missing(cached, tokens)
        for other in [request for request in self._cached if request not in asked]:
            if missing > self._blocks.available:
                self.end(other)
        if missing > self._blocks.available:
            return False
        self._blocks.grow(cached, missing)
        return True

    def _draw(self, rows: list[_DraftRow]) -> dict[DraftRequest, list[int]]:
        """Compute the rows: first their known tokens, then one drawn token after the other."""
        first = Step(self._steps, leaves=list(range(self._taken)))
        for slot, row in enumerate(rows):
            request, cached = row.request, row.cached
            first.joins.append(
                Join(
                    slot,
                    cached.tokens[:],
                    request.prompt_len,
                    [cached.tables[0].pages],
                    cached.params,
                    request.seed,
                )
            )
            _add(first, slot, cached.computed, row.count, draws=row.draws > 0)
        self._taken = len(rows)
        drawing, step = list(enumerate(rows)), first
        while drawing and self._compute(step, rows):
            drawing = [(slot, row) for slot, row in drawing if len(row.cached.drawn) < row.draws]
            step = Step(self._steps)
            for slot, row in drawing:
                _add(step, slot, row.cached.computed, 1, draws=True)
        self.failed.update(row.request for _, row in drawing if not row.cached.drawn)
        return {row.request: row.cached.drawn for row in rows}

    def _compute(self, step: Step, rows: Sequence[_DraftRow]) -> bool:
        """Compute a step whose slots are rows; whether there was room for it."""
        self._steps += 1
        try:
            result = self._runner.collect(self._runner.launch(step))
        except MemoryError:
            # The step was not run. Tokens of earlier steps are a draft all the same.
            return False
        tokens = iter(result.tokens)
        for index, slot in enumerate(step.slots):
            row = rows[slot]
            drawn = next(tokens) if step.samples[index] else None
            if index in result.failed:
                # The logits are not finite, or the options bar every token.
                row.draws = 0
                self.end(row.request)
                if not row.cached.drawn:
                    self.failed.add(row.request)
                continue
            row.cached.computed += step.counts[index]
            # The last known token has to be computed again.
            whole = min(row.cached.computed, len(row.cached.tokens) - 1)
            self._blocks.publish(row.cached, whole)
            if drawn is not None:
                row.cached.drawn.append(drawn)
        return True


def _add(step: Step, slot: int, start: int, count: int, *, draws: bool) -> None:
    step.slots.append(slot)
    step.starts.append(start)
    step.counts.append(count)
    step.samples.append(int(draws))


def _drawn_by(params: SamplingParams) -> SamplingParams:
    """The options that decide which token is drawn, which logprobs do not."""
    return replace(params, logprobs=None, prompt_logprobs=None, logprob_token_ids=None)
