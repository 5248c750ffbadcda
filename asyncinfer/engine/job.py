"""One submitted stream inside the engine: a `Job` with `n` `Answer`s."""

from __future__ import annotations

from contextvars import Context

from asyncinfer.chunk import Timings, TokenLogprob, Usage
from asyncinfer.engine.mailbox import Mailbox, Outcome
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.ports import Port
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Request
from asyncinfer.text import Detokenizer, StopStrings

__all__ = ["Answer", "Job"]


class Answer:
    """One of the `n` answers: what turns its tokens into chunks. `request.owner` is this."""

    __slots__ = (
        "count",
        "detokenizer",
        "ended",
        "held_ids",
        "held_logprobs",
        "held_text",
        "index",
        "job",
        "reason",
        "request",
        "stops",
    )

    def __init__(
        self, job: Job, index: int, request: Request, detok: Detokenizer, stops: StopStrings | None
    ) -> None:
        self.job = job
        self.index = index
        self.request = request
        self.detokenizer = detok
        self.stops = stops
        self.ended = False
        #: Why it is complete; None before, and where it never becomes so.
        self.reason: str | None = None
        #: Tokens drawn.
        self.count = 0
        # What waits for the rest of a character, or for room in a coalescing buffer.
        self.held_text = ""
        self.held_ids: list[int] = []
        self.held_logprobs: list[TokenLogprob] = []


class Job:
    """A stream from its submission to its one end."""

    __slots__ = (
        "answers",
        "capacity",
        "context",
        "deadline",
        "delivered",
        "ended",
        "first_token",
        "last_token",
        "mailbox",
        "on_full",
        "open_answers",
        "params",
        "parked",
        "parked_at",
        "prompt_len",
        "prompt_logprobs",
        "request_id",
        "room",
        "started",
        "submitted",
    )

    def __init__(
        self,
        request_id: str,
        port: Port,
        params: SamplingParams,
        options: RequestOptions,
        now: float,
        context: Context,
    ) -> None:
        self.request_id = request_id
        self.mailbox = Mailbox(port)
        #: Tokens the stream holds unread before `on_full` applies.
        self.capacity = options.buffer
        #: Tokens put into the mailbox, and how many may be by what is known of its reader.
        self.delivered = 0
        self.room = options.buffer
        self.params = params
        self.prompt_len = 0
        self.on_full = options.on_full
        self.context = context
        self.answers: list[Answer] = []
        self.open_answers = params.n
        self.ended = False
        #: Monotonic seconds; `deadline` ends the job, None never.
        self.submitted = now
        self.deadline = None if options.deadline is None else now + options.deadline
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        #: Answers that wait for the consumer, and since when.
        self.parked: list[Answer] = []
        self.parked_at = 0.0
        self.prompt_logprobs: list[TokenLogprob | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )

    @property
    def full(self) -> bool:
        """Whether `on_full` applies."""
        if self.delivered >= self.room:
            # The reader's count is its own core's to write: it is looked at when it matters.
            self.room = self.mailbox.taken + self.capacity
        return self.delivered >= self.room and not self.mailbox.quiet

    @property
    def drained(self) -> bool:
        """Low enough for a parked stream to go on."""
        return (self.delivered - self.mailbox.taken) * 2 <= self.capacity or self.mailbox.quiet

    def add_prompt_logprobs(self, position: int, entries: tuple[TokenLogprob, ...]) -> None:
        """Logprobs of the prompt tokens from `position` on. After a preemption some come twice."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += entries[len(self.prompt_logprobs) - position :]

    def outcome(self, now: float, error: BaseException | None) -> Outcome:
        tokens = sum(answer.count for answer in self.answers)
        usage = Usage(
            prompt_tokens=self.prompt_len,
            cached_tokens=self.answers[0].request.cached_tokens if self.answers else 0,
            completion_tokens=tokens,
        )
        started = now if self.started is None else self.started
        first = now if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        longest = max((answer.count for answer in self.answers), default=0)
        timings = Timings(
            queued=started - self.submitted,
            prefill=first - started,
            ttft=first - self.submitted,
            per_token=(last - first) / (longest - 1) if longest > 1 else 0.0,
            total=now - self.submitted,
        )
        prompt = None if self.prompt_logprobs is None else tuple(self.prompt_logprobs)
        return Outcome(error, usage, timings, prompt)
