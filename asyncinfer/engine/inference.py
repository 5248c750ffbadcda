"""`Inference`: the methods by which a program asks an engine for something."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from asyncinfer.bounds import MAX_N
from asyncinfer.checks import check_integer
from asyncinfer.chunk import Completion
from asyncinfer.config import EngineConfig, OnFull
from asyncinfer.engine.beam_group import BEAM_SAMPLING, BeamOptions
from asyncinfer.engine.best_of import best_choices, candidate_options
from asyncinfer.engine.embedding import PARAMS, SCORED, Embeddings, Score, embed, score
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.hold import Hold, Pin
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.session import Session, open_session
from asyncinfer.engine.spoken import SpokenMessages
from asyncinfer.engine.stream import Stream
from asyncinfer.errors import InvalidRequest
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Pooling
from asyncinfer.suggestions import suggestion
from asyncinfer.tools import ChatOptions

__all__ = ["Inference"]

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))


class Inference:
    """The requests of an `Engine`. The subclass `Engine` adds opening and closing."""

    config: EngineConfig
    _frontend: Frontend

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

        Sampling options are those of `SamplingParams`, as `params=` or by name; given by name, the
        others have the model's own defaults: see `default_params`. `adapter` names a LoRA adapter
        that `engine.adapters` has loaded. `prediction` is the text or the tokens that you expect,
        such as a file to be edited: the parts of it that the answer repeats come faster.

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
            near = suggestion(name, sorted(_SAMPLING | _named()))
            raise InvalidRequest(name, sampling[name], f"is no option of a request{near}")
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
            # `Overloaded` would invite a later try, and this request never fits.
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
        """A conversation that begins with `messages`, after the system message `system`. `options`
        are those of `stream` for every answer, such as `tools` and `cache_scope`. Until the session
        is closed, the prefix cache evicts its blocks last, within `EngineConfig.pinned_share`;
        after `ttl` seconds without an answer it treats them like all others. Raises as `stream`
        does, also for bad messages and for a model without a chat template."""
        loaded = self._frontend.check().loaded
        eos_ids = loaded.tokenizer.eos_ids if loaded.template else None
        return open_session(self.stream, eos_ids, messages, system, options, self.hold(ttl))

    def hold(self, ttl: float | None = None) -> Hold:
        """Keeps the blocks of a session or a pin, for programs that carry conversations to other
        machines. Raises `InvalidRequest`."""
        return Hold(self._frontend, ttl)

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
        """A context manager that computes a prompt and has the prefix cache keep it like an open
        session. Requests that begin with this prompt find it cached, whatever came between. Options
        are those of `stream` and `session`. Entering it raises what `generate` raises."""
        chat = ChatOptions.of(tools, None, True, template_options, False)
        options = self._plain_options(cache_scope, adapter, priority, deadline)
        self._frontend.check()
        hold = self.hold(ttl)
        options = dataclasses.replace(options, chat=chat, conversation=hold.conversation)

        async def compute() -> int:
            return (await self._stream(prompt, PARAMS, options)).usage.prompt_tokens

        return Pin(compute, hold)

    async def generate(self, prompt: Any, **options: Any) -> Completion:
        """The whole answer at once; options as for `stream`. Cancelling it aborts the request."""
        self._frontend.check()
        if options.get("deadline") is None:
            # Few requests begin in one turn of the loop, since a crowd would hold up streams. A
            # request with a deadline does not wait here: the deadline counts from registration.
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
        requests. Of the sampling options it takes those that restrict the answer. Raises what
        `generate` raises; cancelled, it leaves nothing behind.

        Args:
            beams: kept at each token, in all groups together.
            length_penalty: a score is the sum of logprobs over the number of tokens to this power.
            early_stopping: True ends with as many answers as beams; False once the best beam scores
                no better than the worst answer; "never" once no beam could score better.
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
                checkpoint's `modules.json` says, whose dense layers apply, too; else "last".
            normalize: to length 1. None: as `modules.json` says; else True.
            dimensions: how many leading dimensions to keep, of a model that was trained for that.
            prompt_name: which of the checkpoint's prompts comes before each text.

        Raises what `generate` raises; an error of one text ends the others.
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
        """The logprobs of texts (or token ids) as continuations of a prompt, each by itself.
        Continuations are tokenised by themselves and computed together; full blocks of the prompt
        are computed once. Raises what `generate` raises."""
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
        """Sample `candidates` answers and return the `n` with the highest mean logprob per token,
        the best first: see `Choice.score`. Other options are those of `stream`."""
        check_integer("candidates", candidates, 1, MAX_N)
        check_integer("n", n, 1, candidates)
        sampled, wanted = candidate_options(options)
        done = await self.generate(prompt, n=candidates, **sampled)
        return best_choices(done, n, keep_logprobs=wanted)


@functools.cache
def _named() -> frozenset[str]:
    """The other options of a request."""
    return frozenset(inspect.signature(Inference.stream).parameters) - {"self", "prompt"}
