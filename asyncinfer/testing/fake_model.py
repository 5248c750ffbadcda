"""`FakeRunner`: a step runner without tensors whose answer depends on every KV entry it reads.

See `asyncinfer.testing.oracle` for what it computes. Like a real runner it knows only what plans
tell it (leaves, joins, grown, copies), keeps its own slots, and feeds the tokens it drew to the
next step whether or not they were collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from asyncinfer.chunk import TokenLogprob
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler.plan import Join, RowLogprobs, RunnerSpec, StepPlan, StepResult
from asyncinfer.testing.oracle import MASK, A, fake_logprob, mix, next_token, oracle

__all__ = ["FakeRunner", "Gate"]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

#: Called with "launch" or "collect" before either; may block, may raise.
Gate = Callable[[Literal["launch", "collect"], StepPlan], None]


class FakeRunner:
    """A `StepRunner` over hashes instead of tensors.

    Args:
        strict: read every KV entry of every row through its block table (simulation). Otherwise
            only the last one, whose stored digest stands for those before it (benchmarks: 256
            decode rows cost about as much as a replayed CUDA graph's launch).
        eos_every: about one draw in so many is the end-of-text token `EOS_ID`; None: never.
        gate: called at every launch and collect.
        failing: rows of a plan that fail, with the reason; garbage is written as their KV.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        *,
        strict: bool = False,
        eos_every: int | None = None,
        gate: Gate | None = None,
        failing: Callable[[StepPlan], Mapping[int, Exception]] | None = None,
    ) -> None:
        self._spec = spec
        self.strict = strict
        self.eos_every = eos_every
        self.gate = gate
        self.failing = failing
        self.closed = False
        self.launched = 0
        self.collected = 0
        size, slots = spec.block_size, spec.max_slots
        width = -(-spec.max_context // size)
        self._kv: U64 = np.empty((spec.num_blocks, size), np.uint64)
        self._digest: U64 = np.empty((spec.num_blocks, size), np.uint64)
        self._garbage = 0
        self.poison(range(spec.num_blocks))
        self._tables = np.full((slots, width), -1, np.int64)
        self._history = np.zeros((slots, spec.max_context + 1), np.int64)
        #: Per slot: tokens in the KV cache, tokens known, seed (0: greedy).
        self._computed = np.zeros(slots, np.int64)
        self._known = np.zeros(slots, np.int64)
        self._seeds = np.zeros(slots, np.uint64)
        self._sampled = np.zeros(slots, np.bool_)
        self._tenants: list[Join | None] = [None] * slots
        #: Slots whose next draw must step over stop tokens, or that want logprobs.
        self._special: set[int] = set()
        self._pending: deque[tuple[StepPlan, StepResult]] = deque()

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
        )

    def logprob(self, token: int, position: int, alternatives: int) -> TokenLogprob:
        """The logprob entry of `token` at `position` of its sequence."""
        return fake_logprob(token, position, alternatives, self._spec.vocab_size)

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill pages with garbage, so that whoever still reads them shows it."""
        for block in blocks:
            self._garbage += 1
            self._kv[block] = mix(self._garbage)
            self._digest[block] = mix(-self._garbage & MASK)

    def page(self, block: int) -> list[int]:
        """The KV a page holds."""
        return [int(entry) for entry in self._kv[block]]

    # -- StepRunner ----------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> object:
        if self.gate is not None:
            self.gate("launch", plan)
        assert not self.closed, "launch after close"
        self._apply(plan)
        self._check(plan)
        result = self._compute(plan)
        self.launched += 1
        self._pending.append((plan, result))
        return plan

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, StepPlan)
        if self.gate is not None:
            self.gate("collect", handle)
        assert self._pending, "collect without a launch"
        plan, result = self._pending.popleft()
        assert plan is handle, f"step {handle.step} collected before step {plan.step}"
        self.collected += 1
        return result

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True

    # -- the plan's deltas ---------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.leaves:
            assert self._tenants[slot] is not None, f"slot {slot} leaves twice"
            self._tenants[slot] = None
            self._tables[slot] = -1
            self._special.discard(slot)
        for join in plan.joins:
            self._join(join)
        for slot, index, block in plan.grown:
            assert self._tenants[slot] is not None, f"table of empty slot {slot} grows"
            assert self._tables[slot, index] == -1, f"slot {slot}: entry {index} set twice"
            assert index == 0 or self._tables[slot, index - 1] >= 0, f"slot {slot}: gap at {index}"
            self._tables[slot, index] = block
        for source, target in plan.copies:
            self._kv[target] = self._kv[source]
            self._digest[target] = self._digest[source]

    def _join(self, join: Join) -> None:
        slot, known = join.slot, len(join.token_ids)
        assert self._tenants[slot] is None, f"slot {slot} is taken"
        assert 1 <= join.prompt_len <= known <= self._spec.max_context
        self._tenants[slot] = join
        self._tables[slot, : len(join.blocks)] = join.blocks
        self._history[slot, :known] = join.token_ids
        self._known[slot] = known
        self._computed[slot] = -1
        params = join.params
        self._sampled[slot] = not params.greedy
        self._seeds[slot] = join.seed & MASK
        if params.logprobs is not None or (params.min_tokens and join.stop_ids):
            self._special.add(slot)

    def _check(self, plan: StepPlan) -> None:
        spec, rows = self._spec, len(plan.slots)
        assert rows, "an empty plan"
        assert len(plan.starts) == len(plan.counts) == len(plan.samples) == rows
        assert plan.tokens <= spec.max_step_tokens, "over the token budget"
        assert len(set(plan.slots)) == rows, "a slot twice"
        joined = {join.slot for join in plan.joins}
        assert joined <= set(plan.slots), "a join without a row"
        slots = np.array(plan.slots)
        starts, counts = np.array(plan.starts), np.array(plan.counts)
        ends = starts + counts
        assert all(self._tenants[slot] is not None for slot in plan.slots), "a row of no tenant"
        assert (counts >= 1).all()
        assert (starts >= 0).all()
        computed = self._computed[slots]
        assert ((computed == starts) | (computed == -1)).all(), "a row skips or repeats tokens"
        assert (ends <= self._known[slots]).all(), "a row computes tokens nobody knows"
        draws = np.array(plan.samples)
        assert (((draws == 1) & (ends == self._known[slots])) | (draws == 0)).all()
        assert (self._known[slots] + draws <= spec.max_context).all(), "beyond the context"
        last = self._tables[slots, (ends - 1) // spec.block_size]
        assert ((last >= 0) & (last < spec.num_blocks)).all(), "a block table too short"
        if self.strict:
            self._check_writes(plan)

    def _check_writes(self, plan: StepPlan) -> None:
        """No page that a row writes is in any other table."""
        size = self._spec.block_size
        users: dict[int, int] = {}
        for table in self._tables:
            for block in table[table >= 0].tolist():
                users[block] = users.get(block, 0) + 1
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            for index in range(start // size, (start + count - 1) // size + 1):
                block = int(self._tables[slot, index])
                assert users[block] == 1, f"slot {slot} writes shared block {block}"

    # -- the forward pass ----------------------------------------------------------------------

    def _compute(self, plan: StepPlan) -> StepResult:
        slots, starts = np.array(plan.slots), np.array(plan.starts)
        counts = np.array(plan.counts)
        ends = starts + counts
        # Every read comes before every write: a page another row writes in this step is stale.
        kv, digest = self._read(slots, starts)
        single = counts == 1
        if single.all():
            digest = self._decode(slots, starts, kv, digest)
        else:
            index = np.nonzero(single)[0]
            digest[index] = self._decode(slots[index], starts[index], kv[index], digest[index])
            for row in np.nonzero(~single)[0].tolist():
                digest[row] = self._prefill(
                    plan.slots[row], plan.starts[row], plan.counts[row], kv[row], digest[row]
                )
        self._computed[slots] = ends
        result = self._draw(plan, slots, ends, digest)
        for row, k in plan.prompt_logprobs.items():
            result.prompt_logprobs[row] = self._prompt_logprobs(plan, row, k)  # type: ignore[index]
        if self.failing is not None:
            result.failed = dict(self.failing(plan))
            for row in result.failed:
                slot, start = plan.slots[row], plan.starts[row]
                self._garbage += 1
                for p in range(start, start + plan.counts[row]):
                    block = self._tables[slot, p // self._spec.block_size]
                    self._kv[block, p % self._spec.block_size] = mix(self._garbage)
        return result

    def _read(self, slots: I64, starts: I64) -> tuple[U64, U64]:
        """KV and digest before each row's first token."""
        size = self._spec.block_size
        before = np.maximum(starts - 1, 0)
        pages = self._tables[slots, before // size]
        offsets = before % size
        first = starts == 0
        kv = self._kv[pages, offsets]
        kv[first] = 0
        if self.strict:
            digest = np.array([self._reread(s, n) for s, n in zip(slots, starts, strict=True)])
        else:
            digest = self._digest[pages, offsets]
            digest[first] = 0
        return kv, digest

    def _reread(self, slot: int, length: int) -> np.uint64:
        size = self._spec.block_size
        pages = self._tables[slot, : -(-length // size)]
        return np.uint64(
            (self._kv[pages].reshape(-1)[:length] * _weights(0, length)).sum(dtype=np.uint64)
        )

    def _decode(self, slots: I64, positions: I64, kv: U64, digest: U64) -> U64:
        size = self._spec.block_size
        tokens = self._history[slots, positions].astype(np.uint64)
        kv = kv * np.uint64(A) + _mix(tokens + np.uint64(1))
        digest = digest + kv * (_mix(positions.astype(np.uint64)) | np.uint64(1))
        pages, offsets = self._tables[slots, positions // size], positions % size
        self._kv[pages, offsets] = kv
        self._digest[pages, offsets] = digest
        return digest

    def _prefill(
        self, slot: int, start: int, count: int, kv: np.uint64, digest: np.uint64
    ) -> np.uint64:
        size = self._spec.block_size
        tokens = self._history[slot, start : start + count].astype(np.uint64)
        up, down = _powers(count)
        chunk = up * (kv + np.cumsum(_mix(tokens + np.uint64(1)) * down, dtype=np.uint64))
        digests = digest + np.cumsum(chunk * _weights(start, count), dtype=np.uint64)
        positions = np.arange(start, start + count)
        pages, offsets = self._tables[slot, positions // size], positions % size
        self._kv[pages, offsets] = chunk
        self._digest[pages, offsets] = digests
        return np.uint64(digests[-1])

    def _draw(self, plan: StepPlan, slots: I64, ends: I64, digest: U64) -> StepResult:
        rows = np.nonzero(np.array(plan.samples))[0]
        slots, last, digest = slots[rows], ends[rows] - 1, digest[rows]
        seeds = _mix(self._seeds[slots] + last.astype(np.uint64) * np.uint64(A))
        h = _mix(digest ^ np.where(self._sampled[slots], seeds, np.uint64(0)))
        tokens = (1 + h % np.uint64(self._spec.vocab_size - 1)).astype(np.int64)
        if self.eos_every is not None:
            tokens[(h >> np.uint64(40)) % np.uint64(self.eos_every) == 0] = 0
        logprobs: dict[int, RowLogprobs] = {}
        if self._special:
            for i, slot in enumerate(slots.tolist()):
                if slot in self._special:
                    position = int(last[i])
                    tokens[i] = token = self._special_draw(slot, position, int(digest[i]))
                    k = self._tenant(slot).params.logprobs
                    if k is not None:
                        entry = self.logprob(token, position + 1, k)
                        logprobs[int(rows[i])] = _row([entry])
        self._history[slots, last + 1] = tokens
        self._known[slots] += 1
        return StepResult(tokens=tokens.tolist(), logprobs=logprobs, prompt_logprobs={})

    def _special_draw(self, slot: int, position: int, digest: int) -> int:
        join = self._tenant(slot)
        early = position + 1 - join.prompt_len < join.params.min_tokens
        return next_token(
            digest,
            position,
            seed=None if join.params.greedy else join.seed,
            vocab_size=self._spec.vocab_size,
            eos_every=self.eos_every,
            barred=join.stop_ids if early else (),
        )

    def _prompt_logprobs(self, plan: StepPlan, row: int, alternatives: int) -> RowLogprobs:
        slot, start = plan.slots[row], plan.starts[row]
        end = min(start + plan.counts[row] + 1, self._tenant(slot).prompt_len)
        return _row(
            [
                self.logprob(int(self._history[slot, p]), p, alternatives)
                for p in range(start + 1, end)
            ]
        )

    def _tenant(self, slot: int) -> Join:
        join = self._tenants[slot]
        assert join is not None
        return join


def _row(entries: list[TokenLogprob]) -> RowLogprobs:
    return RowLogprobs(
        token_ids=[e.token_id for e in entries],
        logprobs=[e.logprob for e in entries],
        ranks=[e.rank for e in entries],
        top=[e.top for e in entries],
    )


def _mix(x: U64) -> U64:
    """`mix` of every element."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _weights(start: int, count: int) -> U64:
    return _mix(np.arange(start, start + count, dtype=np.uint64)) | np.uint64(1)


def _powers(count: int) -> tuple[U64, U64]:
    """A**1 .. A**count and their inverses."""
    inverse = pow(A, -1, 2**64)
    up = np.cumprod(np.full(count, A, np.uint64), dtype=np.uint64)
    down = np.cumprod(np.full(count, inverse, np.uint64), dtype=np.uint64)
    return up, down
