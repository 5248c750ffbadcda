"""The engine's results: chunks, completions, statistics. All are frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "Choice",
    "Chunk",
    "Completion",
    "EngineHealth",
    "EngineStats",
    "LoadProgress",
    "Timings",
    "TokenLogprob",
    "Usage",
]


class TokenLogprob(NamedTuple):
    """The logprob of one token under the model's own distribution (before penalties,
    temperature and truncation), in natural logarithms."""

    token_id: int
    logprob: float
    #: 1 for the most likely token of its position.
    rank: int
    #: The most likely `(token_id, logprob)` pairs of the position, best first.
    top: tuple[tuple[int, float], ...] = ()


class Chunk(NamedTuple):
    """One delta of a stream. `text` is what this chunk adds, never what came before."""

    text: str
    token_ids: tuple[int, ...] = ()
    #: One entry per token, or empty when `logprobs` was not asked for.
    logprobs: tuple[TokenLogprob, ...] = ()
    #: Which of the `n` answers this chunk belongs to. (Hides `tuple.index`.)
    index: int = 0  # type: ignore[assignment]
    #: None until the last chunk of this index.
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a request took: `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the monotonic clock, measured by the engine."""

    queued: float = 0.0
    prefill: float = 0.0
    #: Time to first token, from submission.
    ttft: float = 0.0
    #: Mean time between tokens after the first; 0.0 with fewer than two tokens.
    per_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` answers to a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    #: "stop" (a stop string, stop token or end of text), "length", "stopped" (by you).
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer. With `n > 1` the first answer's fields are also the completion's."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    #: One entry per prompt token, None for the first; None when not asked for.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a model has been loaded; `progress=` of an engine is called with it, on the engine's
    thread."""

    #: Bytes of weights on the device so far, as stored in the checkpoint.
    bytes_done: int
    bytes_total: int
    #: The tensor that they were of, or a part of it; empty before the first.
    tensor: str = ""


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
    #: Pages of the layers that see a window, each for the tokens of a block; 0 where the model has
    #: no such layers, or they keep their KV in the blocks.
    window_pages_total: int = 0
    #: Window pages that hold nothing.
    window_pages_free: int = 0
    #: Window pages of no running request, kept for blocks that hold a reusable prefix.
    window_pages_cached: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    #: Bytes of host memory charged to the requests that are held: see `max_held_bytes`.
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether an engine serves."""

    #: "opening": it loads its model. "open": it serves. "degraded": it serves, and `reasons` say
    #: what is amiss. "draining": it is closing, and requests it has may end. "closed": you closed
    #: it, or never opened it. "dead": it broke; `cause` says of what.
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
