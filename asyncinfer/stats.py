"""What an engine says of itself: how far it has loaded, statistics, health. All are frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["AdapterInfo", "DraftStats", "EngineHealth", "EngineStats", "Fallback", "LoadProgress"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a model has been loaded; `progress=` of an engine is called with it, on the engine's
    thread."""

    #: Bytes of weights on the device so far, as stored in the checkpoint.
    bytes_done: int
    bytes_total: int
    #: The tensor that the last bytes belong to; empty before the first.
    tensor: str = ""
    #: A GPU's kernels compiled so far, and those known to be needed so far.
    kernels_done: int = 0
    kernels_total: int = 0


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A LoRA adapter that is loaded."""

    name: str
    #: The largest of its modules' ranks.
    rank: int
    #: Bytes of its matrices in the model's dtype.
    bytes: int
    #: The model that it was trained on, as its maker named it; None where that is not said.
    base_model: str | None
    #: Requests that use it.
    requests: int


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What became of the drafts of one method."""

    #: "prediction", or the proposer's name.
    method: str
    #: Drafted tokens that were right, and that were wrong, by position in the draft.
    accepted: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fallback:
    """A fast part that an engine does without: its answers are right, but slower."""

    #: "kernels": torch's operators replace Triton's. "products": torch's operators multiply
    #: quantised matrices on a CPU. "graphs": only steps recorded before are replayed. "attention":
    #: our own kernels replace FlashInfer's.
    part: Literal["kernels", "graphs", "products", "attention"]
    reason: str

    def __str__(self) -> str:
        if self.part == "kernels":
            return f"torch's operators run in place of Triton's kernels: {self.reason}"
        if self.part == "products":
            return f"torch's operators multiply quantised matrices: {self.reason}"
        if self.part == "attention":
            return f"our own kernels attend in place of FlashInfer's: {self.reason}"
        return f"steps are not recorded: {self.reason}"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent snapshot of an engine; counters count since it was opened."""

    running: int = 0
    waiting: int = 0
    #: Paused because their consumer does not read.
    paused: int = 0
    #: KV blocks. If `window_pages_total` is not 0, they hold the KV of the layers without a window
    #: only; if all layers have a window, a block still counts its tokens but takes no memory.
    blocks_total: int = 0
    #: Blocks that hold nothing.
    blocks_free: int = 0
    #: Blocks that hold a reusable prefix and belong to no running request.
    blocks_cached: int = 0
    #: Blocks that open conversations pin, in use or not.
    blocks_pinned: int = 0
    #: Pages of the layers that see a window, each for the tokens of a block; 0 where the model has
    #: no such layers, or they keep their KV in the blocks.
    window_pages_total: int = 0
    #: Window pages that hold nothing.
    window_pages_free: int = 0
    #: Window pages of no running request, kept for blocks that hold a reusable prefix.
    window_pages_cached: int = 0
    #: Pages of the layers that keep a state in place of KV, each of the state after a block; 0
    #: where the model has no such layers.
    state_pages_total: int = 0
    #: State pages that hold nothing.
    state_pages_free: int = 0
    #: State pages of no running request, kept for blocks that hold a reusable prefix.
    state_pages_cached: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    #: Formats of structured output that were compiled, the seconds that took on worker threads, and
    #: requests that found theirs compiled.
    grammars_compiled: int = 0
    compile_seconds: float = 0.0
    grammar_hits: int = 0
    #: Masks made for tokens to be drawn under a format, and the seconds that took.
    masks: int = 0
    mask_seconds: float = 0.0
    #: Tokens that their format left no choice for, and that took no forward pass of their own.
    forced_tokens: int = 0
    #: What became of drafted tokens, by method.
    drafts: tuple[DraftStats, ...] = ()
    #: Bytes of host memory charged to the requests that are held: see `max_held_bytes`.
    held_bytes: int = 0
    #: LoRA adapters that requests may name.
    adapters: int = 0
    #: Bytes of adapters on the device, including unloaded ones that requests still use.
    adapter_bytes: int = 0
    #: What of the GPU path is not used, in the order in which it was found.
    fallbacks: tuple[Fallback, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether an engine serves."""

    #: "opening": it loads its model. "open": it serves. "degraded": it serves, and `reasons` say
    #: what is amiss. "draining": it is closing, while its requests may end. "closed": you closed
    #: it, or never opened it. "dead": it broke, and `cause` says why.
    state: Literal["opening", "open", "degraded", "draining", "closed", "dead"]
    #: For people: a step that takes long, all requests held that may be, plugins that are not
    #: called any more; or why it is closed or dead.
    reasons: tuple[str, ...] = ()
    #: What the engine died of, or what kept it from being opened; None in all other states.
    cause: BaseException | None = None

    @property
    def serving(self) -> bool:
        """Whether it takes requests: "open" or "degraded"."""
        return self.state in ("open", "degraded")
