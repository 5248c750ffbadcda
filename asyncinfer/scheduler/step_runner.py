"""`StepRunner`: what computes steps, as the scheduler and the decode loop see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from asyncinfer.cache.page_group import KVGroupSpec
from asyncinfer.scheduler.row_logprobs import RowLogprobs
from asyncinfer.scheduler.step import Step

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["RunnerSpec", "StepResult", "StepRunner"]


@dataclass(slots=True)
class StepResult:
    """What a step drew. `tokens` is flat, in row order, `samples[r]` entries per row (rows that
    failed included, their entries meaningless)."""

    tokens: list[int]
    logprobs: Mapping[int, RowLogprobs] = field(default_factory=dict)
    #: Row -> logprobs of the tokens at `starts + 1 .. starts + counts` that are prompt tokens.
    prompt_logprobs: Mapping[int, RowLogprobs] = field(default_factory=dict)
    #: Row -> what `Step.poolings` asks for: float32 `[hidden]`, after the final norm.
    pooled: Mapping[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    #: Row -> why it failed (NaN logits, a sampler that raised). Nothing of such a row is committed.
    failed: Mapping[int, Exception] = field(default_factory=dict)
    #: Row of `Step.predicts` -> the position after its last drawn token that its draft accepts; and
    #: one or more tokens that may come there.
    predicted: Mapping[int, tuple[int, Sequence[int]]] = field(default_factory=dict)
    #: Row with a draft -> how many of its first draws can be used. The next one failed, which fails
    #: the request only if all drafted tokens before it are right.
    spoilt: Mapping[int, int] = field(default_factory=dict)
    #: Whether the device had finished the step before when this one was launched, though nobody had
    #: collected it: the device waited for the host.
    late: bool = False


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
    #: The target seconds of a step with answers, which bounds prompts in it; None: no bound.
    step_target: float | None = None
    #: Whether it runs sampler plugins.
    samplers: bool = False
    #: Whether it restricts draws by masks: see `Step.matchers`.
    masks: bool = False
    #: Whether it computes drafts: see `Step.drafts`.
    drafts: bool = False
    #: Whether it computes guides: see `Step.guided`.
    guides: bool = False
    #: Whether a prompt must be computed in one step, and nothing is drawn after it: its tokens
    #: attend to each other in both directions.
    whole_prompts: bool = False
    #: How the runner predicts the tokens after a draw, see `Step.predicts`: "mtp" or "eagle3";
    #: empty if it does not.
    predicts: str = ""
    #: Size of the hidden states that it gives, see `Step.poolings`; 0: it gives none.
    hidden_size: int = 0
    #: Most steps in flight at once from which it gains.
    overlap: int = 1
    #: What bounds `max_context`, for messages.
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
    and grown tables stand and its rows do not count; the next step leaves the slots that joined in
    it or had tokens forced.
    """

    @property
    def spec(self) -> RunnerSpec: ...

    def launch(self, step: Step) -> object: ...

    def collect(self, handle: object) -> StepResult: ...

    def prepare(self) -> bool:
        """Do a little of what would take time in a later step, at most some milliseconds of it,
        while there is no step to compute; False if there is nothing left to do for now."""

    def close(self) -> None:
        """Give device memory back; called once, after the last step."""
