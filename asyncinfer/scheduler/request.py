"""`Request`: one answer being generated, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from asyncinfer.cache.page_group import BlockTable
from asyncinfer.cache.prefix_cache import CacheEntry, Tenant
from asyncinfer.params import SamplingParams
from asyncinfer.protocols.scheduling import RequestView
from asyncinfer.scheduler.plan import ChosenSampler

__all__ = ["Request", "RequestState"]


class RequestState(Enum):
    """Where a request is. Only RUNNING, LEAVING and some PAUSED ones own a slot and blocks."""

    NEW = "new"
    #: In the waiting queue, or following a request that computes the same prefix.
    WAITING = "waiting"
    RUNNING = "running"
    #: Not scheduled until resumed; keeps slot and blocks until somebody needs them.
    PAUSED = "paused"
    #: Off the batch, but a step in flight still uses its slot and blocks.
    LEAVING = "leaving"
    FINISHED = "finished"


class Request:
    """One sequence: a prompt and the answer so far. With `n > 1` there is one per answer.

    The engine makes it and hands it to `Scheduler.add`; from then on only the scheduler writes
    to it, except for `owner`.
    """

    __slots__ = (
        "after",
        "arrival",
        "bad_ids",
        "cached_tokens",
        "committed",
        "computed",
        "deadline",
        "entry",
        "followers",
        "following",
        "fork_of",
        "id",
        "in_flight",
        "index",
        "keys",
        "left",
        "max_total",
        "node",
        "owner",
        "params",
        "preemptions",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "published",
        "room",
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
        prompt_ids: Sequence[int],
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
        fork_of: Request | None = None,
        owner: object = None,
    ) -> None:
        """
        Args:
            id: grows with submission, unique in the engine.
            max_total: prompt and answer together, from `Scheduler.check_fits`.
            seed: key of the random numbers, 64 bits; each of `n` answers needs its own.
            arrival, deadline: monotonic seconds.
            scope, adapter: requests that differ in either share no prefix.
            prompt_ids: a list is kept and not copied, so that answers to one prompt share it: it
                must not change any more. The first token drawn makes a list of the request's own.
            keys: `PrefixCache.keys(prompt_ids, scope, adapter)`, best computed off the engine's
                thread; None leaves it to the scheduler. Kept and shared like `prompt_ids`.
            samplers: its own, not shared with another request.
            index: which of the `n` answers.
            fork_of: the request with index 0 and the same prompt, added before this one.
            owner: the engine's own record; the scheduler never touches it.
        """
        self.id: Final = id
        self.prompt_len: Final = len(prompt_ids)
        #: Prompt and answer, as far as committed.
        self.tokens = prompt_ids if isinstance(prompt_ids, list) else list(prompt_ids)
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
        self.owner = owner

        self.state = RequestState.NEW
        #: Stable row of the runner, -1 without one.
        self.slot = -1
        #: The block table of each KV group; none at all without blocks.
        self.tables: list[BlockTable] = []
        #: Times it lost its blocks and had to be computed again.
        self.preemptions = 0
        #: Prompt tokens taken from the prefix cache when it was first admitted.
        self.cached_tokens = 0
        #: The running sibling to share the prompt's blocks with; None once admitted.
        self.fork_of = fork_of
        #: Chain keys of the full blocks of `tokens`, as far as needed.
        self.keys: list[bytes] = [] if keys is None else keys
        #: Tokens that the block tables have room for.
        self.room = 0
        #: How far its blocks are in the prefix cache; see `asyncinfer.cache.Tabled`.
        self.published = 0
        self.node: CacheEntry | Tenant | None = self.tenant
        #: Tokens whose KV is written, and those whose KV is or will be by a step in flight.
        self.committed = 0
        self.computed = 0
        #: Draws still to be scheduled.
        self.left = max_total - len(self.tokens)
        #: Steps in flight that compute a row of it.
        self.in_flight = 0
        #: What a LEAVING request becomes.
        self.after = RequestState.NEW
        #: Alternatives per prompt logprob, None without; one answer of the `n` reports them.
        self.prompt_logprobs = params.prompt_logprobs if index == 0 else None
        #: Prompt tokens whose logprob was committed.
        self.scored = 0
        #: What scheduling policies see of it, made when one asks; None when it has changed.
        self.view: RequestView | None = None
        #: Its place in the waiting queue.
        self.entry: object = None
        #: The request it waits for, and a heap of those that wait for it to have committed so
        #: many tokens: `(tokens, serial, request)`.
        self.following: Request | None = None
        self.followers: list[tuple[int, int, Request]] = []

    @property
    def known(self) -> int:
        """Tokens known, including those drawn by steps in flight."""
        return self.max_total - self.left

    def chunk(self, budget: int) -> int:
        """Tokens to compute next. A row never straddles the last prompt token whose logprob was
        given before a preemption, so that none is given twice."""
        end = self.known
        if self.prompt_logprobs is not None and self.computed < self.scored:
            end = self.scored
        return min(end - self.computed, budget)

    def draw_first(self, token: int) -> None:
        """Append the first token of the answer. From now on tokens and keys are its own."""
        self.tokens = [*self.tokens, token]
        self.keys = list(self.keys)

    @property
    def scope(self) -> str:
        return self.tenant[0]

    @property
    def answer(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.tokens[self.prompt_len :]

    def __repr__(self) -> str:
        size = f"{self.prompt_len}+{len(self.tokens) - self.prompt_len}/{self.max_total}"
        return f"<Request {self.id} {self.state.value} {size}>"
