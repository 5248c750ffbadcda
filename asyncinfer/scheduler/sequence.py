"""`Sequence`: a prompt and one answer to it, as the scheduler sees them."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from asyncinfer.cache.conversations import Conversation
from asyncinfer.cache.entry import CacheEntry, Namespace
from asyncinfer.cache.page_group import BlockTable
from asyncinfer.grammar import Matcher, Reasoning
from asyncinfer.params import SamplingParams
from asyncinfer.protocols.sampler import SamplerPlugin
from asyncinfer.protocols.scheduling import RequestView
from asyncinfer.speculation import Drafter

__all__ = ["ChosenSampler", "Pooling", "Sequence", "SequenceState"]

#: Which of a prompt's last hidden states its embedding is: that of the last token, or their mean.
Pooling = Literal["last", "mean"]


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
    """One answer in progress; a request with `n > 1` answers has one sequence for each. The engine
    makes it and hands it to `Scheduler.add`. From then on each field has the writer that is named
    above it. Beside these, `Committer` takes back what rejected drafts had added, and
    `SlotAllocator` begins anew where a sequence gets or loses its slot."""

    __slots__ = (
        *("adapter_slot", "after", "arrival", "bad_ids", "cached_tokens", "candidates"),
        *("capacity", "committed", "computed", "conversation", "deadline", "drafted"),
        *("drafter", "draws_left", "followers", "following", "fork_of", "guide", "guides"),
        *("id", "index", "keys", "matcher", "max_total", "namespace", "node", "owner"),
        *("params", "place", "pooling", "preemptions", "priority", "prompt_len"),
        *("prompt_logprobs", "published", "reasoning", "resting", "samplers", "scored", "seed"),
        *("slot", "state", "stop_ids", "tables", "tokens", "view"),
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
        adapter_slot: int = -1,
        stop_ids: frozenset[int] = frozenset(),
        bad_ids: tuple[tuple[int, ...], ...] = (),
        samplers: tuple[ChosenSampler, ...] = (),
        matcher: Matcher | None = None,
        reasoning: Reasoning | None = None,
        drafter: Drafter | None = None,
        candidates: int = 0,
        prompt_len: int | None = None,
        keys: list[bytes] | None = None,
        index: int = 0,
        fork_of: Sequence | None = None,
        conversation: Conversation | None = None,
        scored: int = 0,
        pooling: Pooling | None = None,
        guide: Sequence | None = None,
        owner: Any = None,
    ) -> None:
        """
        Args:
            id: grows with submission, unique in the engine.
            max_total: prompt and answer together, from `Scheduler.check_fits`.
            seed: key of the random numbers, 64 bits. Each of `n` answers needs its own.
            arrival, deadline: monotonic seconds.
            scope, adapter: sequences that differ in either share no prefix.
            adapter_slot: where the runner has its adapter, -1 without one.
            prompt_ids: a list is shared by answers to one prompt in place of being copied, so it
                must not change any more. The first drawn token makes a copy of it.
            keys: `PrefixCache.keys(prompt_ids, scope, adapter)`, best computed off the engine's
                thread; None leaves it to the scheduler. Kept and shared like `prompt_ids`.
            samplers, matcher, reasoning, drafter: made for this sequence alone.
            matcher: what the answer has to fit, at the answer's start.
            reasoning: ends the answer's reasoning within its budget.
            drafter: makes the sequence's drafts; None decodes one token a row.
            candidates: above 0 the sequence is a beam: a draw gives so many tokens that may follow,
                and appends none. The engine then forks or ends the sequence.
            prompt_len: tokens of the prompt; None where `prompt_ids` are no more than that.
            index: which of the `n` answers.
            fork_of: a sequence, added before this one, that computes all tokens but the last.
            conversation: the request's conversation, which has one request at a time.
            scored: with prompt logprobs, how many prompt tokens, from the second on, need none.
            pooling: what the prompt's embedding is made of; None without one.
            guide: the sequence of its negative prompt, which computes what this one draws after its
                own prompt. It is not added: the scheduler takes the two together, or neither.
            owner: the engine's own record, which the scheduler never touches.
        """
        # Constant.
        self.id: Final = id
        self.prompt_len: Final = len(prompt_ids) if prompt_len is None else prompt_len
        self.params: Final = params
        self.seed: Final = seed
        self.priority: Final = priority
        self.arrival: Final = arrival
        self.deadline: Final = deadline
        # Not `Final`, since `Tabled` has it as a plain attribute.
        self.namespace: Namespace = (scope, adapter)
        self.adapter_slot: Final = adapter_slot
        self.stop_ids: Final = stop_ids
        self.bad_ids: Final = bad_ids
        self.samplers: Final = samplers
        #: `Committer` tells these the tokens.
        self.matcher: Final = matcher
        self.reasoning: Final = reasoning
        self.drafter: Final = drafter
        self.candidates: Final = candidates
        self.max_total: Final = max_total
        self.conversation: Final = conversation
        self.pooling: Final = pooling
        self.index: Final = index
        #: Alternatives per prompt logprob, None without. One answer of the `n` reports them.
        self.prompt_logprobs: Final = params.prompt_logprobs if index == 0 else None

        self.guide: Final = guide

        # Written by the engine.
        self.owner = owner

        # Written by `SequenceStates`.
        self.state = SequenceState.NEW
        #: What a LEAVING sequence becomes.
        self.after = SequenceState.NEW
        #: Times it lost its pages and had to be computed again.
        self.preemptions = 0
        #: Whether no method drafts for it for a while, so that it decodes as those without do.
        self.resting = False
        #: The sequence that this one is the guide of, from when that is added until it ends.
        self.guides: Sequence | None = None

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
        #: Its index in all that the runner keeps for each slot, -1 without one.
        self.slot = -1

        # Written by `BlockManager`; see `asyncinfer.cache.Tabled`.
        self.tables: list[BlockTable] = []
        self.capacity = 0
        self.published = 0
        self.node: CacheEntry | Namespace | None = self.namespace
        #: `Scheduler.add` makes those of the prompt where the engine did not.
        self.keys: list[bytes] = [] if keys is None else keys

        # Written by `Step` as it is scheduled or taken back.
        #: Draws that are still to be scheduled.
        self.draws_left = max_total - len(prompt_ids)
        #: Drafted tokens that a step in flight computes, the last ones of its row.
        self.drafted = 0
        #: Tokens whose KV is written or will be by a step in flight. `SlotAllocator` begins it.
        self.computed = 0

        # Written by `Committer`.
        #: Tokens whose step was committed, so that their KV is written. `SlotAllocator` begins it.
        self.committed = 0
        #: Prompt and answer, as far as committed.
        self.tokens = prompt_ids if isinstance(prompt_ids, list) else list(prompt_ids)
        #: Prompt tokens whose logprob was committed or is not needed.
        self.scored = scored

    @property
    def counted_as(self) -> SequenceState:
        """Under which state the engine's counters include it. Any thread."""
        if self.state is SequenceState.NEW:
            return SequenceState.WAITING
        return self.after if self.state is SequenceState.LEAVING else self.state

    @property
    def in_flight(self) -> int:
        """Tokens that steps in flight compute."""
        return self.computed - self.committed

    @property
    def stepwise(self) -> bool:
        """Whether only one row may be in flight at a time, since each needs the draw of the one
        before it. A drawn token decides on the next mask, and on what is appended without a draw.
        The next position depends on how many drafted tokens were right, while somebody drafts.
        Beams are chosen row by row. The tokens of a guide come from the row that it guides."""
        return bool(
            self.matcher is not None
            or self.reasoning is not None
            or (self.drafter is not None and not self.resting)
            or self.candidates
            or self.guide is not None
            or self.guides is not None
        )

    @property
    def prompt_only(self) -> bool:
        """Whether no answer is wanted, so that the sequence ends with its prompt."""
        return self.max_total == self.prompt_len

    @property
    def total_known(self) -> int:
        """Tokens known, including those drawn by steps in flight."""
        return self.max_total - self.draws_left

    def chunk(self, budget: int) -> int:
        """Query tokens to compute next, at most `budget`. After a preemption a row ends where
        prompt logprobs were reported already, so that none is reported twice."""
        end = self.total_known
        if self.prompt_logprobs is not None and self.computed < self.scored:
            end = self.scored
        return min(end - self.computed, budget)

    @property
    def scope(self) -> str:
        return self.namespace[0]

    def __repr__(self) -> str:
        size = f"{self.prompt_len}+{len(self.tokens) - self.prompt_len}/{self.max_total}"
        return f"<Sequence {self.id} {self.state.value} {size}>"
