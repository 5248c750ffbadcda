"""`Intake`: from a prompt to scheduler requests, off the event loop where that may take long."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from secrets import randbits
from typing import Any

from asyncinfer.config import EngineConfig
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.core import Core
from asyncinfer.engine.footprint import prepared_bytes
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.job import Job, Phase
from asyncinfer.engine.jobs import named_failure
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.output_stream import OutputStream
from asyncinfer.engine.prompt_reader import PromptReader, message_chars
from asyncinfer.engine.prompt_workers import PromptWorkers
from asyncinfer.engine.runtime import Runtime
from asyncinfer.engine.samplers import resolve_samplers, samplers_at_hand
from asyncinfer.engine.turn_limit import TurnLimits
from asyncinfer.errors import InvalidRequest, Overloaded
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import ChosenSampler, Sequence
from asyncinfer.text import Detokenizer, StopStrings, panicked

__all__ = ["Intake"]

#: Requests up to this size are prepared on the spot (well under a millisecond); a trip to a worker
#: thread costs more than they do.
INLINE_CHARS = 1024
INLINE_TOKENS = 4096
INLINE_WORDS = 4

_SEED_MASK = 2**64 - 1


class Intake:
    """Prepares jobs and hands them to the decode thread. Long prompts go to daemon threads, so that
    neither an event loop nor the exit of the interpreter waits for them.

    A job that ends meanwhile is dropped: at once while it waits, else between two phases of its
    preparation. Its place is taken until then.
    """

    def __init__(
        self, core: Core, config: EngineConfig, admission: Admission, runtime: Runtime
    ) -> None:
        self._core = core
        self._loaded = core.loaded
        self._scheduler = core.scheduler
        self._reader = PromptReader(core.loaded, config)
        self._admission = admission
        self._ids = count()
        self._workers = PromptWorkers(runtime)
        self._turns = TurnLimits()

    async def take_in(
        self, job: Job, prompt: Any, options: RequestOptions, deadline_hint: float | None
    ) -> None:
        """Prepare an admitted job and hand it on. Raises `InvalidRequest`, and what the job ended
        with; returns if it was aborted. Whatever it raises, the job is gone."""
        if _is_short(prompt, job.params):
            await self._in_line(job)
            self.prepare_here(job, prompt, options, deadline_hint)
        else:
            work = partial(self.prepare_here, job, prompt, options, deadline_hint)
            await self._on_worker(job, work, _size(prompt))
        outcome = job.buffer.outcome
        if outcome is not None and outcome.error is not None:
            raise outcome.raised()

    def prepare_here(
        self, job: Job, prompt: Any, options: RequestOptions, deadline_hint: float | None
    ) -> None:
        """`take_in` on the calling thread, from now to the end. A job that has ended is dropped."""
        try:
            if not job.ended:
                self.prepare(job, prompt, options, deadline_hint)
        except _Ended:
            pass
        except BaseException as error:
            if not self._admission.refuse(job):
                self._drop(job)
            if panicked(error) and not isinstance(error, Exception):
                raise named_failure(job, error) from error
            raise
        if self._admission.advance(job, Phase.QUEUED):
            self._core.post(Command.SUBMIT, job)
        else:
            self._drop(job)

    def close(self) -> None:
        """Let the threads end after what they do now. Waits for nothing."""
        self._workers.close()

    @property
    def alive(self) -> bool:
        """Whether one of the threads runs."""
        return self._workers.alive

    async def _in_line(self, job: Job) -> None:
        """Wait until the event loop has time for a short prompt."""
        buffer = job.buffer
        try:
            await self._turns.wait(buffer, lambda: buffer.outcome)
        except BaseException:
            self._cancelled(job)
            self._drop(job)
            raise

    async def _on_worker(self, job: Job, work: Callable[[], None], size: int) -> None:
        buffer = job.buffer
        failed: list[BaseException] = []
        done = False

        def task() -> None:
            nonlocal done
            try:
                work()
            except BaseException as error:
                failed.append(error)
            done = True
            buffer.bridge.post(buffer.bridge.wake, buffer)

        try:
            self._workers.give(task, size)
        except Overloaded as error:
            self._admission.overloaded(job, error)
            raise
        except BaseException:
            self._admission.refuse(job)
            raise
        try:
            await buffer.wait_for(lambda: done or buffer.outcome)
        except BaseException:
            self._cancelled(job)
            raise
        finally:
            if not done and self._workers.drop(task):
                self._drop(job)
        if failed and buffer.outcome is None:
            # Not kept here: its traceback refers to this frame.
            raise failed.pop()

    def _cancelled(self, job: Job) -> None:
        """The consumer waits no more."""
        if self._admission.withdraw(job) is None:
            self._core.post(Command.ABORT, job)
        else:
            self._admission.told((job,))

    def _drop(self, job: Job) -> None:
        """Give back the place of a job that has ended before the decode thread took it over."""
        # In this order: whatever ends the engine meanwhile finds the job in its place or the inbox.
        self._core.post(Command.RELEASE, job)
        self._admission.leave(job)

    def prepare(
        self, job: Job, prompt: Any, options: RequestOptions, deadline_hint: float | None
    ) -> None:
        """Make the scheduler's requests, on the calling thread. Raises `InvalidRequest`."""
        params, tokenizer, scheduler = job.params, self._loaded.tokenizer, self._scheduler
        chosen = resolve_samplers(params)
        if chosen and not scheduler.spec.samplers:
            raise InvalidRequest("sampler", params.sampler, "this model runs no samplers")
        params.check_vocabulary(scheduler.spec.vocab_size)
        token_ids = self._reader.token_ids(prompt, params, partial(_go_on, job))
        total = scheduler.check_fits(len(token_ids), params.max_tokens, params.prompt_logprobs)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= tokenizer.eos_ids
        bad_ids = tuple(ids for word in params.bad_words for ids in tokenizer.bad_word_ids(word))
        seed = randbits(64) if params.seed is None else params.seed & _SEED_MASK
        cache = scheduler.cache
        keys = None
        blocks = 0 if cache is None else len(token_ids) // scheduler.spec.block_size
        self._admission.charge(job, prepared_bytes(len(token_ids), blocks, params))
        _go_on(job)
        if cache is not None:
            pause = partial(_breathe, job) if len(token_ids) > INLINE_TOKENS else None
            keys = cache.keys(token_ids, options.cache_scope, pause=pause)
        job.prompt_len = len(token_ids)
        first: Sequence | None = None
        for index in range(params.n):
            request = Sequence(
                next(self._ids),
                token_ids,
                params,
                max_total=total,
                # Golden-ratio steps keep the answers' random streams apart (Weyl sequence).
                seed=(seed + index * 0x9E3779B97F4A7C15) & _SEED_MASK,
                arrival=job.submitted,
                priority=options.priority,
                deadline=deadline_hint,
                scope=options.cache_scope,
                stop_ids=stop_ids,
                bad_ids=bad_ids,
                # What is saved of a sampler's state is each answer's own.
                samplers=tuple(ChosenSampler(*each) for each in chosen),
                keys=keys,
                index=index,
                fork_of=first,
            )
            first = first or request
            stops = StopStrings(params.stop) if params.stop else None
            output = OutputStream(job, index, request, Detokenizer(tokenizer, token_ids), stops)
            request.owner = output
            job.outputs.append(output)


def _is_short(prompt: Any, params: SamplingParams) -> bool:
    """Whether it is prepared on the event loop."""
    if isinstance(prompt, str):
        most = INLINE_CHARS
    elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], int):
        most = INLINE_TOKENS
    else:
        # An empty one is refused on the spot.
        return isinstance(prompt, list | tuple) and not prompt
    small = len(prompt) * params.n <= most and len(params.bad_words) <= INLINE_WORDS
    return small and samplers_at_hand(params)


def _size(prompt: Any) -> int:
    """Characters or tokens, roughly, by which the prompt's worker is chosen."""
    if not isinstance(prompt, str | list | tuple):
        return 0
    if len(prompt) < INLINE_TOKENS and not isinstance(prompt, str):
        return max(len(prompt), message_chars(prompt))
    return len(prompt)


class _Ended(Exception):
    """The job has ended while it was prepared."""


def _go_on(job: Job) -> None:
    """Between two phases of a preparation."""
    if job.ended:
        raise _Ended


def _breathe(job: Job) -> None:
    _go_on(job)
    # A thread that only runs Python gives the GIL away after 5 ms, too late for an event loop. A
    # sleep gives it away now, and is long enough for another thread to take it.
    time.sleep(50e-6)
