"""One submitted stream inside the engine: a `Job` with `n` `OutputStream`s."""

from __future__ import annotations

import math
from contextvars import Context
from enum import Enum

from asyncinfer.chunk import Timings, Usage
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.output_stream import OutputStream
from asyncinfer.engine.stream_buffer import Outcome, ScoredBuffer, StreamBuffer
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import RowLogprobs

__all__ = ["End", "Job", "Phase"]


class Phase(Enum):
    """Who has a job, and gives its place back when it has ended."""

    #: The intake: a worker thread, or the event loop that submits it.
    PREPARING = "preparing"
    #: The inbox of the decode thread.
    QUEUED = "queued"
    #: The decode thread.
    TAKEN = "taken"


class End(Enum):
    """How a job ended."""

    FINISHED = "finished"
    #: Its consumer left.
    ABORTED = "aborted"
    FAILED = "failed"
    #: With the engine.
    CLOSED = "closed"
    #: Before it was one: its prompt or its options are out of bounds.
    REFUSED = "refused"


class Job:
    """A stream from its submission to its one end."""

    __slots__ = (
        "announced",
        "bound",
        "buffer",
        "capacity",
        "context",
        "deadline",
        "delivered",
        "end",
        "first_token",
        "held_bytes",
        "last_token",
        "open_outputs",
        "options",
        "outcome",
        "outputs",
        "params",
        "paused",
        "paused_at",
        "phase",
        "prompt_len",
        "prompt_logprobs",
        "reported",
        "request_id",
        "room",
        "started",
        "submitted",
        "taken_before",
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
    ) -> None:
        self.request_id = request_id
        coalesces = options.on_full == "coalesce"
        most = options.buffer if coalesces else None
        scored = params.logprobs is not None
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
        #: Tokens put into the buffer, and how many may be as far as the decode thread knows: the
        #: reader may have taken more since `room` was worked out.
        self.delivered = 0
        self.room = self.bound
        self.params = params
        self.prompt_len = 0
        self.options = options
        self.context = context
        self.outputs: list[OutputStream] = []
        self.open_outputs = params.n
        self.phase = Phase.PREPARING
        #: How it ended, and what its consumer is told: once, by `Admission.end`.
        self.end: End | None = None
        self.outcome: Outcome | None = None
        #: Charged to it, by `Admission`.
        self.held_bytes = held_bytes
        #: Whether log and observers were told of the end: once, by `Admission.claim_report`.
        self.reported = False
        #: Whether observers were told of the beginning. Decode thread only.
        self.announced = False
        #: Monotonic seconds; `deadline` ends the job, None never.
        self.submitted = now
        self.deadline = None if options.deadline is None else now + options.deadline
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        #: Answers that wait for the consumer, since when, and how many tokens it had taken then.
        self.paused: list[OutputStream] = []
        self.paused_at = 0.0
        self.taken_before = 0
        #: Of the prompt's tokens from the second on, step by step; None if not asked for.
        self.prompt_logprobs: list[RowLogprobs] | None = (
            None if params.prompt_logprobs is None else []
        )

    @property
    def ended(self) -> bool:
        return self.end is not None

    @property
    def full(self) -> bool:
        """Whether `on_full` applies."""
        if self.delivered >= self.room:
            # Reading the consumer's counter costs a transfer between cores: only here it matters.
            self.room = self.buffer.taken + self.bound
        return self.delivered >= self.room and not self.buffer.quiet

    @property
    def drained(self) -> bool:
        """Low enough for a paused stream to go on."""
        return (self.delivered - self.buffer.taken) * 2 <= self.capacity or self.buffer.quiet

    def unread_since(self, now: float) -> float:
        """When the consumer of a paused stream was last seen to read, in seconds of the clock."""
        taken = self.buffer.taken
        if taken != self.taken_before:
            self.taken_before, self.paused_at = taken, now
        return self.paused_at

    def let_go(self) -> None:
        """Forget the outputs, once nothing is computed for them and everybody was told.

        An output and its request refer to each other. The prompt of an ended job would otherwise
        stay until the garbage collector looks at its oldest objects, which it rarely does.
        """
        outputs, self.outputs, self.paused = self.outputs, [], []
        for output in outputs:
            del output.request

    def add_prompt_logprobs(self, position: int, entries: RowLogprobs) -> None:
        """Logprobs of the prompt tokens from `position` on. After a preemption some come twice."""
        if self.prompt_logprobs is not None:
            known = 1 + sum(map(len, self.prompt_logprobs)) - position
            self.prompt_logprobs.append(entries[known:] if known else entries)

    def summary(self, now: float, error: BaseException | None) -> Outcome:
        """What the consumer is told at an end. Any thread."""
        tokens = sum(output.count for output in self.outputs)
        usage = Usage(
            prompt_tokens=self.prompt_len,
            cached_tokens=self.outputs[0].request.cached_tokens if self.outputs else 0,
            completion_tokens=tokens,
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
        return Outcome(error, usage, timings, prompt)
