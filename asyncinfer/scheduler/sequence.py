"""`Sequence`: a prompt and one answer to it, as the scheduler sees them."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from enum import Enum
from typing import Final

from asyncinfer.cache.page_group import BlockTable
from asyncinfer.cache.prefix_cache import CacheEntry, Tenant
from asyncinfer.params import SamplingParams
from asyncinfer.protocols.sampler import SamplerPlugin
from asyncinfer.protocols.scheduling import RequestView

__all__ = ["ChosenSampler", "Sequence", "SequenceState"]


class SequenceState(Enum):
    """Where a sequence is. Only RUNNING, LEAVING and some PAUSED ones own a slot and pages."""

    NEW = "new"
    #: In the waiting queue, or following a sequence that computes the same prefix.
    WAITING = "waiting"
    RUNNING = "running"
    #: Not scheduled until resumed. Keeps slot and pages until somebody needs them.
    PAUSED = "paused"
    #: Off the batch, but a step in flight still uses its slot and pages.
    LEAVING = "leaving"
    FINISHED = "finished"


@dataclass(slots=True)
class ChosenSampler:
    """A sampler plugin that one request asked for."""

    params: SamplerPlugin
    #: Names the plugin in messages.
    label: str
    #: What the runner kept of its state when the request lost its slot. The runner's own.
    saved: object = None


class Sequence:
    """A request with `n > 1` answers has one sequence for each. The engine makes it and hands it
    to `Scheduler.add`. Then each field has the writer that stands above it.
    """

    __slots__ = (
        "after",
        "arrival",
        "bad_ids",
        "cached_tokens",
        "capacity",
        "committed",
        "computed",
        "deadline",
        "draws_left",
        "followers",
        "following",
        "fork_of",
        "id",
        "in_flight",
        "index",
        "keys",
        "max_total",
        "node",
        "owner",
        "params",
        "place",
        "preemptions",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "published",
        "samplers",
        "scored",
        "seed",
        "slot",
        "state",
        "stop_ids",
        "tables",
        "tenant",
        "tokens",
        "view",
    )

    def __init__(
        self,
        id: int,
        prompt_ids: abc.Sequence[int],
        params: SamplingParams,
        *,
        max_total: int,
        seed: int,
        arrival: float,
        priority: int = 0,
        deadline: float | None = None,
        scope: str = "",
        adapter: str = "",
        stop_ids: frozenset[int] = frozenset(),
        bad_ids: tuple[tuple[int, ...], ...] = (),
        samplers: tuple[ChosenSampler, ...] = (),
        keys: list[bytes] | None = None,
        index: int = 0,
        fork_of: Sequence | None = None,
        owner: object = None,
    ) -> None:
        """
        Args:
            id: grows with submission, unique in the engine.
            max_total: prompt and answer together, from `Scheduler.check_fits`.
            seed: key of the random numbers, 64 bits. Each of `n` answers needs its own.
            arrival, deadline: monotonic seconds.
            scope, adapter: sequences that differ in either share no prefix.
            prompt_ids: a list is kept and not copied, so that answers to one prompt share it: it
                must not change any more. The first token drawn makes a list of the sequence's own.
            keys: `PrefixCache.keys(prompt_ids, scope, adapter)`, best computed off the engine's
                thread; None leaves it to the scheduler. Kept and shared like `prompt_ids`.
            samplers: its own, not shared with another sequence.
            index: which of the `n` answers.
            fork_of: the sequence with index 0 and the same prompt, added before this one.
            owner: the engine's own record, which the scheduler never touches.
        """
        # Constant.
        self.id: Final = id
        self.prompt_len: Final = len(prompt_ids)
        self.params: Final = params
        self.seed: Final = seed
        self.priority: Final = priority
        self.arrival: Final = arrival
        self.deadline: Final = deadline
        self.tenant: Tenant = (scope, adapter)
        self.stop_ids: Final = stop_ids
        self.bad_ids: Final = bad_ids
        self.samplers: Final = samplers
        self.max_total: Final = max_total
        self.index: Final = index
        #: Alternatives per prompt logprob, None without. One answer of the `n` reports them.
        self.prompt_logprobs: Final = params.prompt_logprobs if index == 0 else None

        # Written by the engine.
        self.owner = owner

        # Written by `SequenceStates`.
        self.state = SequenceState.NEW
        #: What a LEAVING sequence becomes.
        self.after = SequenceState.NEW
        #: Times it lost its pages and had to be computed again.
        self.preemptions = 0

        # Written by `WaitingQueue` and by its `Ranking`.
        #: Where it stands in the queue.
        self.place: object = None
        #: What scheduling policies see of it, made when one asks.
        self.view: RequestView | None = None

        # Written by `InflightPrefixes`.
        #: The sequence it waits for.
        self.following: Sequence | None = None
        #: A heap of those that wait until it has committed so many tokens: `(tokens, serial,
        #: sequence)`.
        self.followers: list[tuple[int, int, Sequence]] = []

        # Written by `Admitter`.
        #: The running sibling to share the prompt's blocks with; None once admitted.
        self.fork_of = fork_of
        #: Prompt tokens taken from the prefix cache when it was first admitted.
        self.cached_tokens = 0

        # Written by `SlotAllocator`.
        #: Stable row of the runner, -1 without one.
        self.slot = -1

        # Written by `BlockManager`; see `asyncinfer.cache.Tabled`.
        self.tables: list[BlockTable] = []
        self.capacity = 0
        self.published = 0
        self.node: CacheEntry | Tenant | None = self.tenant
        #: `Scheduler.add` makes those of the prompt where the engine did not.
        self.keys: list[bytes] = [] if keys is None else keys

        # Written by `Step` as it is scheduled or taken back.
        #: Draws that are still to be scheduled.
        self.draws_left = max_total - self.prompt_len
        #: Tokens whose KV is written or will be by a step in flight. `SlotAllocator` begins it.
        self.computed = 0
        #: Steps in flight that compute a row of it. `Committer` counts it down.
        self.in_flight = 0

        # Written by `Committer`.
        #: Tokens whose KV is written. `SlotAllocator` begins it.
        self.committed = 0
        #: Prompt and answer, as far as committed.
        self.tokens = prompt_ids if isinstance(prompt_ids, list) else list(prompt_ids)
        #: Prompt tokens whose logprob was committed.
        self.scored = 0

    @property
    def total_known(self) -> int:
        """Tokens known, including those drawn by steps in flight."""
        return self.max_total - self.draws_left

    def chunk(self, budget: int) -> int:
        """Tokens to compute next. A row never straddles the last prompt token whose logprob was
        given before a preemption, so that none is given twice."""
        end = self.total_known
        if self.prompt_logprobs is not None and self.computed < self.scored:
            end = self.scored
        return min(end - self.computed, budget)

    @property
    def scope(self) -> str:
        return self.tenant[0]

    @property
    def answer(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.tokens[self.prompt_len :]

    def __repr__(self) -> str:
        size = f"{self.prompt_len}+{len(self.tokens) - self.prompt_len}/{self.max_total}"
        return f"<Sequence {self.id} {self.state.value} {size}>"
