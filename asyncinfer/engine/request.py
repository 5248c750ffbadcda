"""One submitted stream inside the engine: a `Request` with a `TokenSink` for each sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import Context
from enum import Enum
from typing import TYPE_CHECKING

from asyncinfer.chunk import Timings, Usage
from asyncinfer.engine.adapter_registry import AdapterUse
from asyncinfer.engine.loop_bridge import LoopBridge, Packed
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.stream_buffer import Outcome, ScoredBuffer, StreamBuffer
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import RowLogprobs, Sequence, SequenceState
from asyncinfer.tools import MessageReader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["End", "Phase", "Request", "TokenSink", "output_of"]


class Phase(Enum):
    """Who has a request, and gives its place back when it has ended."""

    #: The intake has it: a worker thread, or the event loop that submits it.
    PREPARING = "preparing"
    #: It is in the inbox of the decode thread.
    QUEUED = "queued"
    #: The decode thread has it.
    TAKEN = "taken"


class End(Enum):
    """How a request ended."""

    FINISHED = "finished"
    #: Its consumer left.
    ABORTED = "aborted"
    FAILED = "failed"
    #: The engine was closed or died.
    CLOSED = "closed"
    #: It was refused before it became a request, for its prompt, its options or overload.
    REFUSED = "refused"


class Request:
    """A stream from its submission to its one end."""

    __slots__ = (
        *("adapter", "announced", "bound", "buffer", "capacity", "compile_seconds", "context"),
        *("deadline", "delivered", "embedding", "end", "first_token", "held_bytes", "id"),
        *("last_token", "message", "open_outputs", "options", "outcome", "outputs", "params"),
        *("paused", "paused_at", "phase", "prompt_len", "prompt_logprobs", "reported", "room"),
        *("scores", "started", "stop_tokens", "submitted", "taken_before"),
    )

    def __init__(
        self,
        request_id: str,
        bridge: LoopBridge,
        params: SamplingParams,
        options: RequestOptions,
        now: float,
        context: Context,
        held_bytes: int = 0,
        adapter: AdapterUse | None = None,
    ) -> None:
        self.id = request_id
        coalesces = options.on_full == "coalesce"
        most = options.buffer if coalesces else None
        scored = params.alternatives is not None
        self.buffer = ScoredBuffer(bridge, params.n, most) if scored else StreamBuffer(bridge, most)
        #: Tokens the stream holds unread. A step draws one for each answer, so as many fit.
        self.capacity = max(options.buffer, params.n)
        #: Unread tokens at which `on_full` applies: a paused stream is full when nothing more
        #: fits, a cancelled one when something did not fit, and a coalescing one never.
        self.bound: float = self.capacity
        if coalesces:
            self.bound = math.inf
        elif options.on_full == "cancel":
            self.bound += 1
        #: Tokens put into the buffer, and how many may be put: the reader may have taken more since
        #: `room` was worked out.
        self.delivered = 0
        self.room = self.bound
        self.params = params
        #: Its LoRA adapter, which it holds as long as it has a place.
        self.adapter = adapter
        self.prompt_len = 0
        #: Reads the answers to a chat; None where they are text and nothing else. The intake's.
        self.message: MessageReader | None = None
        #: Stop strings that are special tokens, by these. The intake's.
        self.stop_tokens: Mapping[int, str] = {}
        self.options = options
        self.context = context
        self.outputs: list[TokenSink] = []
        self.open_outputs = params.n
        self.phase = Phase.PREPARING
        #: How it ended, and what its consumer is told: once, by `Admission.end`.
        self.end: End | None = None
        self.outcome: Outcome | None = None
        #: Bytes that `Admission` has charged to it.
        self.held_bytes = held_bytes
        #: Whether log and observers were told of the end: once, by `Admission.claim_report`.
        self.reported = False
        #: Whether observers were told of the beginning. Decode thread only.
        self.announced = False
        #: Seconds that its format took to compile, 0 where that was done before; None without one.
        self.compile_seconds: float | None = None
        #: Monotonic seconds; `deadline` ends the request, None never.
        self.submitted = now
        self.deadline = None if options.deadline is None else now + options.deadline
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        #: Answers paused for a full buffer, since when, and how many tokens the consumer had taken.
        self.paused: list[TokenSink] = []
        self.paused_at = 0.0
        self.taken_before = 0
        #: Scores of the answers that a beam search found, the best first; None for other requests.
        self.scores: tuple[float, ...] | None = None
        #: float32 `[hidden]`: the prompt's last state, or the sum of its states so far.
        self.embedding: npt.NDArray[np.float32] | None = None
        #: Logprobs of the prompt's tokens from the second on, step by step; None if not asked for.
        self.prompt_logprobs: list[RowLogprobs] | None = (
            None if params.prompt_logprobs is None else []
        )

    @property
    def ended(self) -> bool:
        return self.end is not None

    @property
    def states(self) -> list[SequenceState]:
        """The scheduler's state of each answer that is not complete, while the request has a place.
        An answer that the scheduler does not have yet is waiting. Any thread."""
        if self.phase is not Phase.TAKEN:
            return [SequenceState.WAITING] * self.params.n
        return [output.sequence.counted_as for output in self.outputs if not output.ended]

    @property
    def full(self) -> bool:
        """Whether `on_full` applies."""
        if self.delivered >= self.room:
            # Reading the consumer's counter costs a transfer between cores: only here it matters.
            self.room = self.buffer.taken + self.bound
        return self.delivered >= self.room and not self.buffer.quiet

    @property
    def drained(self) -> bool:
        """Whether the buffer is empty enough for a paused stream to go on."""
        return (self.delivered - self.buffer.taken) * 2 <= self.capacity or self.buffer.quiet

    def unread_since(self, now: float) -> float:
        """When the consumer of a paused stream was last seen to read, in seconds of the clock."""
        taken = self.buffer.taken
        if taken != self.taken_before:
            self.taken_before, self.paused_at = taken, now
        return self.paused_at

    def stop_reason(self, token: int) -> str | int | None:
        """What is told of an answer that ends with this token: nothing if that is the model's own
        end of text, as mostly."""
        given = token if token in self.params.stop_token_ids else None
        return self.stop_tokens.get(token, given)

    def let_go(self) -> None:
        """Forget the outputs, once nothing is computed for them and everybody was told.

        An output and its sequence refer to each other. The prompt of an ended request would
        otherwise stay until the garbage collector looks at its oldest objects, as it rarely does.
        """
        outputs, self.outputs, self.paused = self.outputs, [], []
        for output in outputs:
            del output.sequence

    def add_prompt_logprobs(self, position: int, entries: RowLogprobs) -> None:
        """Add logprobs of the prompt tokens from `position` on, but for those that are there
        already: after a preemption some come twice."""
        if self.prompt_logprobs is not None:
            there = self.options.scored + sum(map(len, self.prompt_logprobs))
            known = 1 + there - position
            self.prompt_logprobs.append(entries[known:] if known else entries)

    def add_pooled(self, start: int, state: npt.NDArray[np.float32]) -> None:
        """Add what was asked for of the hidden states of a row that begins with token `start`.
        Where a mean is wanted, a preempted prompt is computed from its beginning again."""
        if self.embedding is None or start == 0 or self.options.pooling == "last":
            self.embedding = state
        else:
            self.embedding = self.embedding + state

    def summary(self, now: float, error: BaseException | None) -> Outcome:
        """What the consumer is told at an end. Any thread."""
        tokens = sum(output.count for output in self.outputs)
        drafters = [each for out in self.outputs if (each := out.sequence.drafter) is not None]
        usage = Usage(
            prompt_tokens=self.prompt_len,
            cached_tokens=self.outputs[0].sequence.cached_tokens if self.outputs else 0,
            completion_tokens=tokens,
            accepted_tokens=sum(drafter.accepted for drafter in drafters),
            rejected_tokens=sum(drafter.rejected for drafter in drafters),
        )
        started = now if self.started is None else self.started
        first = now if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        longest = max((output.count for output in self.outputs), default=0)
        timings = Timings(
            queued=started - self.submitted,
            prefill=first - started,
            ttft=first - self.submitted,
            per_token=(last - first) / (longest - 1) if longest > 1 else 0.0,
            total=now - self.submitted,
        )
        prompt = None if self.prompt_logprobs is None else tuple(self.prompt_logprobs)
        return Outcome(error, usage, timings, prompt, self.scores, self.embedding)


class TokenSink:
    """Who takes the tokens drawn for one sequence of a request: the sequence's `owner`."""

    __slots__ = ("count", "ended", "index", "reason", "request", "sequence")

    def __init__(self, request: Request, sequence: Sequence, index: int = 0) -> None:
        self.request = request
        self.sequence = sequence
        #: Which of the request's answers it is.
        self.index = index
        self.ended = False
        #: Why the answer is complete; None before, and where it never becomes so.
        self.reason: str | None = None
        #: Tokens drawn.
        self.count = 0

    def advance(
        self, tokens: tuple[int, ...], reason: str | None, logprobs: Packed = ()
    ) -> str | None:
        """Take `tokens`; `reason` says why the sequence ends with them, if it does. Returns why the
        answer ends, if it does. Raises `RequestFailed` where the request cannot go on."""
        raise NotImplementedError

    def finish(self, reason: str) -> None:
        """The answer ends between two tokens: show what was held back, if anything was."""

    def show_held(self) -> None:
        """The request ends by an error: show what was held back, as far as it is known."""


def output_of(sequence: Sequence) -> TokenSink:
    """The engine's record of one of its sequences."""
    output = sequence.owner
    assert isinstance(output, TokenSink)
    return output
