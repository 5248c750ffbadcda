"""From a prompt to scheduler requests: template, tokenise, check, hash. Off the event loop when
it may take long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from queue import SimpleQueue
from secrets import randbits
from typing import Any

from asyncinfer.config import EngineConfig
from asyncinfer.engine.core import Core
from asyncinfer.engine.job import Answer, Job
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.ports import Cell
from asyncinfer.engine.samplers import resolve_sampler
from asyncinfer.errors import EngineClosed, InvalidRequest
from asyncinfer.scheduler import ChosenSampler, Request
from asyncinfer.text import Detokenizer, StopStrings

__all__ = ["Intake"]

#: Requests up to this size are prepared on the spot (well under a millisecond); a trip to a worker
#: thread costs more than they do.
INLINE_CHARS = 1024
INLINE_TOKENS = 4096
INLINE_WORDS = 4
WORKERS = 2

_SEED_MASK = 2**64 - 1


class Intake:
    """Prepares jobs. Long prompts go to daemon threads of its own, so that neither an event loop
    nor the exit of the interpreter waits for them."""

    def __init__(self, core: Core, config: EngineConfig) -> None:
        self._loaded = core.loaded
        self._scheduler = core.scheduler
        self._config = config
        self._ids = count()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    async def fill(
        self, job: Job, prompt: Any, options: RequestOptions, deadline_hint: float | None
    ) -> None:
        """Give `job` its answers and their requests. Raises `InvalidRequest`."""
        prepare = partial(self.prepare, job, prompt, options, deadline_hint)
        short = INLINE_CHARS if isinstance(prompt, str) else INLINE_TOKENS
        plain = isinstance(prompt, str) or _is_token_ids(prompt)
        params = job.params
        if plain and len(prompt) * params.n <= short and len(params.bad_words) <= INLINE_WORDS:
            prepare()
        else:
            await self._on_worker(Cell(job.mailbox.port), prepare)

    def dismiss(self) -> None:
        """Let the threads end when they have done what they were given. Waits for nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._work.put(None)

    def close(self) -> None:
        self.dismiss()
        for thread in self._threads:
            # One that is in the middle of a prompt ends by itself; it is nobody's to wait for, and
            # this runs on an event loop.
            thread.join(timeout=0.01)
        self._threads.clear()

    async def _on_worker(self, cell: Cell, prepare: Callable[[], None]) -> None:
        done: list[BaseException | None] = []

        def work() -> None:
            error: BaseException | None = None
            try:
                prepare()
            except BaseException as caught:
                error = caught
            done.append(error)
            cell.port.post(cell.port.wake, cell)

        self._give(work)
        await cell.wait_for(lambda: done)
        if done[0] is not None:
            raise done[0]

    def _give(self, work: Callable[[], None]) -> None:
        # A thread that is to end does so after all the work that was taken on, and takes no more.
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine was closed")
            while len(self._threads) < WORKERS:
                thread = threading.Thread(
                    target=_serve, args=(self._work,), name="asyncinfer-intake", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._work.put(work)

    def prepare(
        self, job: Job, prompt: Any, options: RequestOptions, deadline_hint: float | None
    ) -> None:
        """The synchronous core of `fill`."""
        params, tokenizer, scheduler = job.params, self._loaded.tokenizer, self._scheduler
        chosen = None
        if params.sampler is not None:
            if not scheduler.spec.samplers:
                raise InvalidRequest("sampler", params.sampler, "this model runs no samplers")
            chosen = resolve_sampler(params)
        vocab_size = scheduler.spec.vocab_size
        params.check_vocabulary(vocab_size)
        token_ids = self._tokenise(prompt, vocab_size)
        total = scheduler.check_fits(len(token_ids), params.max_tokens)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= tokenizer.eos_ids
        bad_ids = tuple(ids for word in params.bad_words for ids in tokenizer.bad_word_ids(word))
        seed = randbits(64) if params.seed is None else params.seed & _SEED_MASK
        cache = scheduler.cache
        keys = None
        if cache is not None:
            pause = _breathe if len(token_ids) > INLINE_TOKENS else None
            keys = cache.keys(token_ids, options.cache_scope, pause=pause)
        job.prompt_len = len(token_ids)
        first: Request | None = None
        for index in range(params.n):
            request = Request(
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
                sampler=None if chosen is None else ChosenSampler(*chosen),
                keys=None if keys is None else list(keys),
                index=index,
                fork_of=first,
            )
            first = first or request
            stops = StopStrings(params.stop) if params.stop else None
            answer = Answer(job, index, request, Detokenizer(tokenizer), stops)
            request.owner = answer
            job.answers.append(answer)

    def _tokenise(self, prompt: Any, vocab_size: int) -> list[int]:
        tokenizer = self._loaded.tokenizer
        if isinstance(prompt, str):
            self._check_chars(prompt)
            token_ids = tokenizer.encode(prompt)
        elif _is_token_ids(prompt):
            token_ids = [_token_id(i, token, vocab_size) for i, token in enumerate(prompt)]
        elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
            if self._loaded.template is None:
                raise InvalidRequest("prompt", "chat messages", "this model has no chat template")
            text = self._loaded.template.render(prompt)
            self._check_chars(text)
            token_ids = tokenizer.encode_chat(text)
        else:
            raise InvalidRequest(
                "prompt", prompt, "must be a string, a list of token ids or a list of chat messages"
            )
        if not token_ids:
            if tokenizer.bos_id is None:
                raise InvalidRequest("prompt", prompt, "is empty, and the model has no BOS token")
            token_ids = [tokenizer.bos_id]
        return token_ids

    def _check_chars(self, text: str) -> None:
        if len(text) > self._config.max_prompt_chars:
            raise InvalidRequest(
                "prompt",
                f"{len(text)} characters",
                f"must have <= max_prompt_chars={self._config.max_prompt_chars}",
            )


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and (not prompt or isinstance(prompt[0], int))


def _token_id(index: int, token: Any, vocab_size: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int):
        raise InvalidRequest(f"prompt[{index}]", token, "must be an integer token id")
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"prompt[{index}]", token, f"must be in [0, {vocab_size})")
    return token


def _breathe() -> None:
    # A thread that only runs Python gives the GIL away after 5 ms; an event loop shall not wait
    # as long. Sleeping gives it away now, and for long enough that somebody takes it.
    time.sleep(50e-6)


def _serve(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (item := work.get()) is not None:
        item()
        # Do not keep the last prompt alive while waiting for the next.
        del item
