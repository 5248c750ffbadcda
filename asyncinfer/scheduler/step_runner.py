"""`StepRunner`: what computes steps, as the scheduler and the decode loop see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from asyncinfer.cache.page_group import KVGroupSpec
from asyncinfer.scheduler.row_logprobs import RowLogprobs
from asyncinfer.scheduler.step import Step

__all__ = ["RunnerSpec", "StepResult", "StepRunner"]


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
    `MemoryError` from `launch`: the device had no room to compute the step. Then the step's leaves
    and grown tables hold, and its rows count for nothing; who joined leaves with the next step.
    """

    @property
    def spec(self) -> RunnerSpec: ...

    def launch(self, step: Step) -> object: ...

    def collect(self, handle: object) -> StepResult: ...

    def close(self) -> None:
        """Give device memory back; called once, after the last step."""
