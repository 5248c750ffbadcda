"""`Engine`: the object applications hold."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio

from asyncinfer.bounds import MAX_N
from asyncinfer.checks import check_integer, suggestion
from asyncinfer.chunk import Completion
from asyncinfer.config import EngineConfig, OnFull
from asyncinfer.engine.adapters import Adapters
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.assemble import open_core, source_of
from asyncinfer.engine.beam_group import BEAM_SAMPLING, BeamOptions
from asyncinfer.engine.best_of import best_choices
from asyncinfer.engine.closing import close
from asyncinfer.engine.embedding import PARAMS, SCORED, Embeddings, Score, embed, score
from asyncinfer.engine.engine_tokenizer import EngineTokenizer
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.health import failed, health_of
from asyncinfer.engine.hold import Hold, Pin
from asyncinfer.engine.model_info import ModelInfo, info_of
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.session import Session
from asyncinfer.engine.source import ModelSource, Progress
from asyncinfer.engine.spoken import SpokenMessages
from asyncinfer.engine.stream import Stream
from asyncinfer.engine.thread import DecodeThread
from asyncinfer.errors import EngineClosed, InvalidRequest
from asyncinfer.params import SamplingParams
from asyncinfer.runtime import Runtime, Threads
from asyncinfer.scheduler import Pooling
from asyncinfer.stats import EngineHealth, EngineStats
from asyncinfer.tools import ChatOptions

__all__ = ["Engine"]

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_OPTIONS = _SAMPLING | {field.name for field in dataclasses.fields(RequestOptions)}


class Engine:
    """An LLM in this process, to be awaited.

    `Engine(model)` takes a local folder or a hub id in the Hugging Face format; without one it is
    the small model shipped with the package. Options are those of `EngineConfig`, as `config=` or
    by name. Use it as an async context manager, or `await Engine.open(...)` and `aclose()`.

    Requests may come from any event loop (asyncio, uvloop, trio) and thread.
    """

    #: Where time and threads come from; a simulation's subclass has its own.
    _runtime: Runtime = Threads()

    def __init__(
        self,
        model: str | Path | ModelSource | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> None:
        base = EngineConfig() if config is None else config
        if not isinstance(base, EngineConfig):
            raise TypeError(f"config={config!r}: must be an EngineConfig")
        self.config = base.replace(**overrides) if overrides else base
        self._source = source_of(model)
        self._progress = progress
        self._admission = Admission(
            self.config.max_requests, self.config.max_held_bytes, self._runtime.clock
        )
        self._frontend = Frontend(self.config, self._admission, self._runtime)
        named = getattr(self._source, "model", None)
        #: LoRA adapters, to be loaded and unloaded while the engine serves.
        self.adapters = Adapters(
            self._frontend, self._runtime, None if named is None else str(named)
        )
        self._thread: DecodeThread | None = None
        #: The task in whose `async with` the engine is.
        self._opener: int | None = None

    @classmethod
    async def open(
        cls,
        model: str | Path | ModelSource | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> Engine:
        """An engine that is ready; close it with `aclose()`. Raises `ModelLoadError`."""
        return await cls(model, config=config, progress=progress, **overrides).__aenter__()

    async def __aenter__(self) -> Engine:
        self._opener = _current_task()
        await self._open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is GeneratorExit and _current_task() != self._opener:
            # A finalizer closes the coroutine: nothing can be awaited, and no lock be taken.
            self._frontend.forget()
            return
        await self.aclose(drain_timeout=None if kind is None else 0.0)

    def stream(
        self,
        prompt: Any,
        *,
        params: SamplingParams | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_scope: str = "",
        buffer: int | None = None,
        on_full: OnFull | None = None,
        adapter: str | None = None,
        stream_interval: int = 1,
        tools: Sequence[Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        template_options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        prediction: str | Sequence[int] | None = None,
        **sampling: Any,
    ) -> Stream:
        """A stream of the answer to `prompt`: a string, a list of token ids or chat messages.

        Sampling options are those of `SamplingParams`, as `params=` or by name; with names alone,
        what is not named is the model's own default: see `default_params`. `adapter` names a LoRA
        adapter that `engine.adapters` has loaded. `prediction` is the text or the tokens that you
        expect, such as a file to be edited: the parts of it that the answer repeats come faster.

        Chat messages take these options, too:

        Args:
            tools: what the model may call: functions, pydantic models or JSON Schemas.
            tool_choice: "auto" (calls or text), "none", "required", or the name of a tool.
            parallel_tool_calls: whether one answer may call more than once.
            template_options: variables of the chat template, such as `enable_thinking`.
            continue_final_message: go on with the last message, which is the assistant's.

        Raises `InvalidRequest` for bad options here, and for a bad prompt when the stream starts.
        """
        core = self._frontend.check()
        for name in sampling.keys() - _SAMPLING:
            near = suggestion(name, sorted(_OPTIONS))
            raise InvalidRequest(name, sampling[name], f"is not an option of stream(){near}")
        options = RequestOptions(
            priority=priority,
            deadline=deadline,
            cache_scope=cache_scope,
            buffer=self.config.buffer if buffer is None else buffer,
            on_full=self.config.on_full if on_full is None else on_full,
            adapter=adapter,
            stream_interval=stream_interval,
            chat=ChatOptions.of(
                tools, tool_choice, parallel_tool_calls, template_options, continue_final_message
            ),
            prediction=prediction,  # type: ignore[arg-type]
            conversation=prompt.conversation if isinstance(prompt, SpokenMessages) else None,
        )
        if params is None:
            params = core.loaded.defaults.params(sampling)
        elif not isinstance(params, SamplingParams):
            raise InvalidRequest("params", params, "must be SamplingParams")
        elif sampling:
            params = dataclasses.replace(params, **sampling)
        return self._stream(prompt, params, options)

    def _stream(self, prompt: Any, params: SamplingParams, options: RequestOptions) -> Stream:
        if options.adapter is not None:
            self._frontend.check().adapters.check(options.adapter)
        if params.n > self.config.max_requests:
            # `Overloaded` would say "later", and there is no later for this one.
            raise InvalidRequest(
                "n", params.n, f"must be <= max_requests={self.config.max_requests}"
            )
        return Stream(self._frontend, prompt, params, options, owner=self)

    def session(
        self,
        messages: Sequence[Mapping[str, Any]] = (),
        *,
        system: str | None = None,
        ttl: float | None = None,
        **options: Any,
    ) -> Session:
        """A conversation, which begins with `messages`, after what `system` says. `options` are
        those of `stream` for every answer, such as `tools` and `cache_scope`. Until it is closed
        the prefix cache keeps what it has computed before all else, as far as
        `EngineConfig.pinned_share` goes; after `ttl` seconds without an answer only like all else.
        Raises as `stream` does while the engine is not open, and `InvalidRequest` for a model
        without a chat template."""
        loaded = self._frontend.check().loaded
        if not loaded.template:
            raise InvalidRequest("messages", "a chat", "this model has no chat template")
        first = [] if system is None else [{"role": "system", "content": system}]
        hold = Hold(self._frontend, ttl)
        return Session(self.stream, loaded.tokenizer.eos_ids, [*first, *messages], options, hold)

    def pin(
        self,
        prompt: Any,
        *,
        ttl: float | None = None,
        cache_scope: str = "",
        adapter: str | None = None,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Pin:
        """A context manager that computes a prompt and has the prefix cache keep it as it keeps an
        open session, so that requests that begin with it find it, whatever came between. Options
        are those of `stream` and of `session`. Entering it raises what `generate` raises."""
        chat = ChatOptions.of(tools, None, True, template_options, False)
        options = self._plain_options(cache_scope, adapter, priority, deadline)
        self._frontend.check()
        hold = Hold(self._frontend, ttl)
        options = dataclasses.replace(options, chat=chat, conversation=hold.conversation)
        return Pin(partial(self._stream, prompt, PARAMS, options), hold)

    @property
    def default_params(self) -> SamplingParams:
        """The options of a request that names none: those of the model's generation_config.json,
        greedy where that does not say `do_sample`. Raises as `stream` does while the engine is not
        open."""
        return self._frontend.check().loaded.defaults.params({})

    @property
    def tokenizer(self) -> EngineTokenizer:
        """The model's tokenizer and chat template, as requests use them. Raises as `stream` does
        while the engine is not open."""
        return EngineTokenizer(self._frontend.check().loaded, self.config)

    @property
    def model(self) -> ModelInfo:
        """The model's name, context, vocabulary and the like. Raises as `stream` does while the
        engine is not open."""
        return info_of(self._source, self._frontend.check().loaded, self.config)

    async def generate(self, prompt: Any, **options: Any) -> Completion:
        """The whole answer at once; options as for `stream`. Cancelling it aborts the request."""
        self._frontend.check()
        if options.get("deadline") is None:
            # A request with a deadline does not wait here: the deadline counts from registration.
            await self._frontend.turn()
        return await self.stream(prompt, **options)

    async def beam_search(
        self,
        prompt: Any,
        *,
        beams: int,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        groups: int = 1,
        diversity_penalty: float = 0.0,
        priority: int = 0,
        deadline: float | None = None,
        cache_scope: str = "",
        adapter: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """The likeliest answers that a beam search finds, the best first: `Choice.score` of each.

        Beams are sequences like any other, which fork at every token and are computed beside other
        requests. Of sampling options it takes those that limit what an answer may be. Raises what
        `generate` raises; cancelled, it leaves nothing behind.

        Args:
            beams: kept at each token, in all groups together.
            length_penalty: a score is the sum of logprobs over the number of tokens to this power.
            early_stopping: True ends with as many answers as beams; False where the best beam, as
                it is, is no better than the worst answer; "never" where it could not become so.
            groups: into which the beams are divided evenly.
            diversity_penalty: subtracted from a token's logprob for each beam of an earlier group
                that chose the token at this step (Vijayakumar et al., 2018).
        """
        for name in sampling.keys() - BEAM_SAMPLING:
            near = suggestion(name, sorted(BEAM_SAMPLING))
            raise InvalidRequest(name, sampling[name], f"is not an option of beam_search(){near}")
        search = BeamOptions(beams, length_penalty, early_stopping, groups, diversity_penalty)
        params = SamplingParams(temperature=0.0, n=search.beams, **sampling)
        if params.max_tokens == 0:
            raise InvalidRequest("max_tokens", 0, "must be >= 1 for a beam search")
        options = self._plain_options(cache_scope, adapter, priority, deadline)
        return await self._stream(prompt, params, dataclasses.replace(options, search=search))

    async def embed(
        self,
        texts: Sequence[Any],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        cache_scope: str = "",
        adapter: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Embeddings:
        """Vectors of texts (or token ids), computed as prompts are, beside other requests.

        Args:
            pooling: the last hidden state of the last token, or the mean over all tokens, after the
                model's final norm. A mean takes nothing from the prefix cache. None: as the
                checkpoint's `modules.json` says, whose dense layers follow; "last" without one.
            normalize: to length 1. None: as `modules.json` says; True without one.
            dimensions: the first ones alone, of a model that was trained for that.
            prompt_name: which of the checkpoint's prompts comes before each text.

        Raises what `generate` raises; what one text raises ends the others.
        """
        options = self._plain_options(cache_scope, adapter, priority, deadline)

        def begin(text: Any, chosen: Pooling) -> Stream:
            return self._stream(text, PARAMS, dataclasses.replace(options, pooling=chosen))

        return await embed(
            texts, pooling, normalize, dimensions, prompt_name, self._frontend, begin
        )

    async def score(
        self,
        prompt: Any,
        continuations: Sequence[str | Sequence[int]],
        *,
        cache_scope: str = "",
        adapter: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> list[Score]:
        """The logprobs of texts (or token ids) as continuations of a prompt, each on its own. They
        are tokenised by themselves, and computed together: full blocks of the prompt once, for all
        of them. Raises what `generate` raises."""
        options = self._plain_options(cache_scope, adapter, priority, deadline)

        def begin(token_ids: list[int], first: int) -> Stream:
            return self._stream(token_ids, SCORED, dataclasses.replace(options, scored=first))

        return await score(prompt, continuations, self._frontend, begin)

    def _plain_options(
        self, cache_scope: str, adapter: str | None, priority: int, deadline: float | None
    ) -> RequestOptions:
        return RequestOptions(
            priority=priority,
            deadline=deadline,
            cache_scope=cache_scope,
            buffer=self.config.buffer,
            on_full="pause",
            adapter=adapter,
        )

    async def best_of(
        self, prompt: Any, *, candidates: int, n: int = 1, **options: Any
    ) -> Completion:
        """The `n` answers of most logprob per token among `candidates` sampled ones, the best
        first: `Choice.score` of each. Other options as for `stream`."""
        check_integer("candidates", candidates, 1, MAX_N)
        check_integer("n", n, 1, candidates)
        done = await self.generate(prompt, n=candidates, **{"logprobs": 0} | options)
        return best_choices(done, n, keep_logprobs=options.get("logprobs") is not None)

    def stats(self) -> EngineStats:
        """A snapshot of the counters, from any thread, without waiting."""
        core = self._frontend.core
        return EngineStats() if core is None else core.snapshot()

    def health(self) -> EngineHealth:
        """Whether the engine serves, and why not; from any thread, without waiting."""
        thread, core = self._thread, self._frontend.core
        if thread is None or not self._frontend.here:
            why = "it was not opened" if self._frontend.here else "it lives in another process"
            return EngineHealth("closed", (why,))
        if core is None:
            return EngineHealth("opening") if thread.load_error is None else failed(thread)
        return health_of(core, self._admission, thread, self.config, self._runtime.clock())

    async def aclose(self, *, drain_timeout: float | None = None) -> None:
        """Refuse new requests, let running ones go on for `drain_timeout` seconds (None takes the
        configuration's, 0 aborts them), and give all memory back. A second call does nothing.
        An engine that is being opened is closed at once, and whoever opens it gets `EngineClosed`.

        Cancelled, it aborts what runs, and still waits for the step that runs. Raises `EngineDead`
        if that hangs, `ValueError` for a bad `drain_timeout`; never hangs itself.
        """
        thread = self._thread
        if thread is None or not self._frontend.here:
            return
        config = self.config
        if drain_timeout is not None:
            config = config.replace(drain_timeout=drain_timeout)
        await close(self._frontend, thread, config.drain_timeout, self._runtime.clock)

    async def _open(self) -> None:
        if self._thread is not None:
            raise EngineClosed("an engine is opened once; make another")
        bridge = self._frontend.bridge()
        thread = DecodeThread(
            partial(
                open_core,
                self._source,
                self.config,
                self._progress,
                self._admission,
                self._frontend.bridges,
                self._runtime,
            ),
            home=bridge,
            admission=self._admission,
            runtime=self._runtime,
            step_timeout=self.config.step_timeout,
        )
        thread.start()
        self._thread = thread
        try:
            await thread.opened.wait(bridge)
        except BaseException:
            # The thread stops at the next tensor and gives back what it has by itself.
            thread.cancel_open()
            self._thread = None
            raise
        self._frontend.opened(thread.opened_core())

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is None or not self._frontend.here:
            return
        self._frontend.forget()
        if thread.closed.is_set:
            return
        warnings.warn(
            "an Engine was dropped without aclose(); use `async with Engine(...)`",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )


def _current_task() -> int | None:
    """The running task's number; None outside of an event loop."""
    try:
        return anyio.get_current_task().id
    except RuntimeError:
        return None
