"""The data that walks through a step: `StepPlan` down to the runner, `StepResult` back up.

Both are plain Python (no tensors), laid out as parallel lists: row `r` of a step is
`slots[r], starts[r], counts[r], samples[r]`. A row may hold any number of query tokens and draw
any number of tokens, so that prefill chunks, decode and verification of speculated tokens are
one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncinfer.cache.page_group import KVGroupSpec
from asyncinfer.params import SamplingParams
from asyncinfer.protocols.sampler import SamplerPlugin
from asyncinfer.scheduler.row_logprobs import RowLogprobs

__all__ = [
    "ChosenSampler",
    "Join",
    "PageChanges",
    "RunnerSpec",
    "StepPlan",
    "StepResult",
    "StepRunner",
]


@dataclass(slots=True)
class ChosenSampler:
    """A sampler plugin that one request asked for."""

    params: SamplerPlugin
    #: Names the plugin in messages.
    label: str
    #: What the runner kept of its state when the request lost its slot. The runner's own.
    saved: object = None


@dataclass(slots=True)
class Join:
    """A slot gets a new tenant before the step runs (also after a preemption)."""

    slot: int
    #: Every token known so far: the prompt, and after a preemption the answer so far.
    token_ids: Sequence[int]
    #: How many of them are the prompt; the rest is the answer.
    prompt_len: int
    #: The block table of each KV group so far, in order; -1 where no token to come needs a page.
    tables: Sequence[Sequence[int]]
    params: SamplingParams
    #: Key of the request's random numbers, 64 bits.
    seed: int
    #: Tokens that end the answer (end-of-text and `stop_token_ids`): barred until `min_tokens`.
    stop_ids: frozenset[int] = frozenset()
    #: `bad_words`, tokenised.
    bad_ids: tuple[tuple[int, ...], ...] = ()
    #: In the order in which they are called; only the last may draw.
    samplers: tuple[ChosenSampler, ...] = ()


@dataclass(slots=True)
class PageChanges:
    """What changes in the pages of one KV group before a step is computed. Nobody tells when a page
    is given back: its place in the table is not read any more."""

    #: `(slot, index, page)`: block table entries added since the last step.
    grown: list[tuple[int, int, int]] = field(default_factory=list)
    #: `(source, target)` pages to copy whole before any row is computed (copy-on-write).
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """One step. The runner applies, in this order: `leaves`, `joins`, what each group's tables grow
    by, its copies, and then computes the rows."""

    step: int
    slots: list[int] = field(default_factory=list)
    #: Position of each row's first query token (= tokens already in its KV cache).
    starts: list[int] = field(default_factory=list)
    #: Query tokens of each row.
    counts: list[int] = field(default_factory=list)
    #: Tokens each row draws, at its last positions: 0 inside a prompt, 1 to go on.
    samples: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    #: Of each KV group; none at all where no table grows and nothing is copied.
    groups: list[PageChanges] = field(default_factory=list)
    #: Rows whose prompt logprobs were asked for: row -> how many alternatives.
    prompt_logprobs: dict[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Query tokens of the whole step."""
        return sum(self.counts)


@dataclass(slots=True)
class StepResult:
    """What a step drew. `tokens` is flat, in row order, `samples[r]` entries per row (rows that
    failed included, their entries meaningless)."""

    tokens: list[int]
    logprobs: Mapping[int, RowLogprobs] = field(default_factory=dict)
    #: Row -> logprobs of the tokens at `starts + 1 .. starts + counts` that are prompt tokens.
    prompt_logprobs: Mapping[int, RowLogprobs] = field(default_factory=dict)
    #: Row -> why it failed (NaN logits, a sampler that raised). Nothing of it is committed.
    failed: Mapping[int, Exception] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a runner can hold; fixed while it lives."""

    #: The KV groups. The first one sees every token: its pages are the blocks.
    groups: tuple[KVGroupSpec, ...]
    #: Tokens of a page, in every group.
    block_size: int
    max_slots: int
    #: Longest sequence, prompt and answer together.
    max_context: int
    vocab_size: int
    #: Most query tokens in one step.
    max_step_tokens: int
    #: Whether it runs sampler plugins.
    samplers: bool = False
    #: Most steps in flight at once that serve it.
    overlap: int = 1
    #: What `max_context` comes from, for messages.
    context_bound: str = "max_context"

    @property
    def num_blocks(self) -> int:
        return self.groups[0].num_pages

    @property
    def table_width(self) -> int:
        """Entries of a slot's block table in one group."""
        return -(-self.max_context // self.block_size)


class StepRunner(Protocol):
    """Computes steps. Called by the engine's decode thread only, steps in order.

    `launch` may return before the device is done; `collect` waits for that step. Steps are
    collected in the order they were launched. An exception from either ends the engine, but for a
    `MemoryError` from `launch`: the device had no room to compute the step. Then the plan's leaves
    and grown tables hold, and its rows count for nothing; who joined leaves with the next plan.
    """

    @property
    def spec(self) -> RunnerSpec: ...

    def launch(self, plan: StepPlan) -> object: ...

    def collect(self, handle: object) -> StepResult: ...

    def close(self) -> None:
        """Give device memory back; called once, after the last step."""
