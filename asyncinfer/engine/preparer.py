"""`Preparer` turns prompts into sequences, and refuses what is wrong with them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from itertools import count
from secrets import randbits
from typing import Any

from asyncinfer.config import EngineConfig
from asyncinfer.engine import footprint
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.beam_search import BeamSearch
from asyncinfer.engine.core import Core
from asyncinfer.engine.formats import Formats
from asyncinfer.engine.limits import TextStops, reasoning_of, stop_tokens
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.output_stream import OutputStream
from asyncinfer.engine.prompt_reader import PromptReader, is_chat
from asyncinfer.engine.repetition import LoopDetector
from asyncinfer.engine.request import Request
from asyncinfer.engine.samplers import resolve_samplers, samplers_at_hand
from asyncinfer.errors import InvalidRequest
from asyncinfer.grammar import Matcher, compile_stop
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import ChosenSampler, Sequence, check_guided
from asyncinfer.speculation import MOST_DRAFTED, Drafter, PackedTokens
from asyncinfer.text import Detokenizer

__all__ = ["INLINE_TOKENS", "EndedMeanwhile", "Preparer"]

#: Requests up to this size are prepared on the event loop (well under a millisecond); a trip to a
#: worker thread costs more than they do.
INLINE_CHARS = 1024
INLINE_TOKENS = 4096
INLINE_WORDS = 4

_SEED_MASK = 2**64 - 1
#: Most drafted tokens of a step where layers keep states: each has one, maybe of megabytes.
_MOST_WITH_STATES = 4
#: The sampling options of a guide, which draws nothing of its own.
_UNGUIDED = SamplingParams(temperature=0.0)


class EndedMeanwhile(Exception):
    """The request ended while it was prepared."""


class Preparer:
    """Prepares an engine's requests, on whichever thread calls it."""

    def __init__(self, core: Core, config: EngineConfig, admission: Admission) -> None:
        self._loaded = core.loaded
        self._scheduler = core.scheduler
        self._admission = admission
        self._reader = PromptReader(core.loaded, config)
        self._formats = Formats(core.grammars, core.scheduler.spec.masks)
        self._ids = count()

    def at_hand(self, request: Request, prompt: Any) -> bool:
        """Whether `prepare` is short enough for an event loop. Raises what the hash of a schema's
        type raises, which is the caller's own code."""
        short = _is_short(prompt, request.params, request.options.prediction)
        return short and self._formats.at_hand(request.params)

    def prepare(self, request: Request, prompt: Any, wanted_until: float | None) -> None:
        """Make the sequences of the request's answers. Raises `InvalidRequest`, and between two
        phases `EndedMeanwhile`."""
        params, options = request.params, request.options
        tokenizer, scheduler = self._loaded.tokenizer, self._scheduler
        chosen = resolve_samplers(params)
        if chosen and not scheduler.spec.samplers:
            raise InvalidRequest("sampler", params.sampler, "this model runs no samplers")
        params.check_vocabulary(scheduler.spec.vocab_size)
        if params.stop_regex:
            compile_stop(params.stop_regex)
        chars = self._formats.chars(params)
        if chars:
            self._admission.charge(request, footprint.matcher_bytes(chars, params.n))
        # A step may append the drawn token and `forced` more, and all must fit the stream's buffer.
        forced = 0 if options.search is not None else options.buffer - 1
        compiled = partial(setattr, request, "compile_seconds")
        token_ids, message = self._reader.read(
            prompt, params, options.chat, partial(_raise_if_ended, request)
        )
        request.message = message
        if message is not None and message.tools:
            matchers = self._formats.for_calls(message, params, options.buffer - 1, compiled)
            if matchers[0] is not None and options.chat is not None:
                held = footprint.matcher_bytes(options.chat.held_bytes, params.n)
                self._admission.charge(request, held)
        else:
            matchers = self._formats.matchers(params, message, forced, compiled)
        _raise_if_ended(request)
        total = scheduler.check_fits(len(token_ids), params.max_tokens, params.prompt_logprobs)
        negative = self._reader.negative(params, token_ids, options.chat)
        if negative:
            total = check_guided(
                scheduler.spec, len(token_ids), len(negative), total, params.max_tokens
            )
        request.stop_tokens = stop_tokens(params, tokenizer, message)
        ends = () if params.ignore_eos else tokenizer.eos_ids
        stop_ids = frozenset(params.stop_token_ids).union(request.stop_tokens, ends)
        prediction = self._prediction(options)
        bad_ids = tuple(ids for word in params.bad_words for ids in tokenizer.bad_word_ids(word))
        if message is not None:
            bad_ids += message.barred_ids(tokenizer)
        seed = randbits(64) if params.seed is None else params.seed & _SEED_MASK
        cache = scheduler.cache
        adapter = request.adapter
        adapter_key = "" if adapter is None else adapter.key
        keys = free_keys = None
        for ids in (token_ids, negative):
            blocks = 0 if cache is None else len(ids) // scheduler.spec.block_size
            self._admission.charge(request, footprint.prepared_bytes(len(ids), blocks, params))
        extra = footprint.logprob_bytes(total - len(token_ids), params)
        if len(prediction) or scheduler.speculator.proposers:
            extra += footprint.drafting_bytes(len(token_ids), len(prediction), params.n)
        self._admission.charge(request, extra)
        few = 0
        if options.search is not None:
            few = min(options.search.candidates(len(stop_ids)), scheduler.spec.vocab_size)
            answer, most_blocks = total - len(token_ids), total // scheduler.spec.block_size
            extra = footprint.beam_bytes(
                options.search.beams, few, len(token_ids), answer, most_blocks, chars
            )
            self._admission.charge(request, extra)
        _raise_if_ended(request)
        if cache is not None:
            long = max(len(token_ids), len(negative)) > INLINE_TOKENS
            pause = partial(_let_others_run, request) if long else None
            of = partial(cache.keys, scope=options.cache_scope, adapter=adapter_key, pause=pause)
            keys, free_keys = of(token_ids), of(negative)
        request.prompt_len = len(token_ids)
        make = partial(
            Sequence,
            prompt_ids=token_ids,
            params=params,
            max_total=total,
            arrival=request.submitted,
            priority=options.priority,
            deadline=wanted_until,
            scope=options.cache_scope,
            adapter=adapter_key,
            adapter_slot=-1 if adapter is None else adapter.slot,
            stop_ids=stop_ids,
            bad_ids=bad_ids,
            keys=keys,
            conversation=options.conversation,
            scored=options.scored,
            pooling=options.pooling,
        )
        if options.search is not None:
            decoded = partial(Detokenizer, tokenizer, token_ids)
            new_id = partial(next, self._ids)
            search = BeamSearch(request, options.search, scheduler, new_id, decoded)
            search.begin(make(new_id(), seed=seed, matcher=matchers[0], candidates=few))
            return
        stops = TextStops(params, tokenizer, message)
        self._admission.charge(request, stops.held_bytes)
        first: Sequence | None = None
        for index in range(params.n):
            # Golden-ratio steps keep the answers' random streams apart (Weyl sequence).
            index_seed = (seed + index * 0x9E3779B97F4A7C15) & _SEED_MASK
            number = next(self._ids)
            guide = None
            if negative:
                # A guide's draws are those of the sequence that it guides.
                guide = make(
                    next(self._ids),
                    prompt_ids=negative,
                    params=_UNGUIDED,
                    max_total=len(negative) + total - len(token_ids),
                    seed=0,
                    stop_ids=frozenset(),
                    bad_ids=(),
                    keys=free_keys,
                    conversation=None,
                    scored=0,
                    index=1,
                )
            sequence = make(
                number,
                guide=guide,
                seed=index_seed,
                # Each answer has its own saved state of a sampler.
                samplers=tuple(ChosenSampler(*each) for each in chosen),
                matcher=matchers[index],
                reasoning=reasoning_of(params, tokenizer, token_ids, options.buffer),
                drafter=self._drafter(request, chosen, index_seed, prediction, matchers[index]),
                index=index,
                fork_of=first,
            )
            first = first or sequence
            output = OutputStream(
                request,
                index,
                sequence,
                stops.detokenizer(Detokenizer(tokenizer, token_ids)),
                stops.watcher(),
                None if params.repetition_stop is None else LoopDetector(*params.repetition_stop),
            )
            sequence.owner = output
            if guide is not None:
                guide.owner = output
            request.outputs.append(output)

    def _prediction(self, options: RequestOptions) -> PackedTokens:
        """The tokens that the caller expects. Raises `InvalidRequest`."""
        expected = options.prediction
        if isinstance(expected, str):
            return PackedTokens(self._loaded.tokenizer.encode_inner(expected, "prediction"))
        vocab_size = self._scheduler.spec.vocab_size
        if expected is not None and (most := max(expected, default=-1)) >= vocab_size:
            raise InvalidRequest("prediction", most, f"token ids must be < {vocab_size}")
        return PackedTokens(expected or ())

    def _drafter(
        self,
        request: Request,
        chosen: Iterable[tuple[Any, ...]],
        seed: int,
        prediction: PackedTokens,
        matcher: Matcher | None,
    ) -> Drafter | None:
        """The drafter of an answer; None where nobody can draft for it."""
        scheduler, params, options = self._scheduler, request.params, request.options
        # Each answer's tokens of a step have room in the buffer.
        states = any(group.state for group in scheduler.spec.groups)
        most = _MOST_WITH_STATES if states else MOST_DRAFTED
        most = min(most, options.buffer // params.n - 1)
        able = scheduler.spec.drafts and all(
            getattr(one, "commutes_with_speculation", False) for one, *_ in chosen
        )
        guessing = scheduler.speculator.proposers or scheduler.spec.predicts
        if not able or most < 1 or not (len(prediction) or guessing):
            return None
        return Drafter(
            params,
            request.prompt_len,
            seed,
            scope=options.cache_scope,
            prediction=prediction,
            # Where the committer appends forced tokens itself, a draft of them is useless.
            forced=None if matcher is None or matcher.most_forced else matcher.following,
            most=most,
            predictor=scheduler.spec.predicts,
            rows=1 if params.guidance_scale == 1 else 2,
        )


def _is_short(
    prompt: Any, params: SamplingParams, prediction: str | tuple[int, ...] | None
) -> bool:
    """Whether it is prepared on the event loop."""
    if isinstance(prediction, str) and len(prediction) > INLINE_CHARS:
        return False
    if isinstance(prompt, str):
        most = INLINE_CHARS
    elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], int):
        most = INLINE_TOKENS
    else:
        # An empty prompt is refused right here.
        return isinstance(prompt, list | tuple) and not prompt
    negative = params.negative_prompt or ()
    if params.stop_regex or len(negative) > INLINE_CHARS or is_chat(negative):
        # A regular expression may have to be compiled, and messages have to be rendered.
        return False
    small = len(prompt) * params.n <= most and len(params.bad_words) <= INLINE_WORDS
    return small and samplers_at_hand(params)


def _raise_if_ended(request: Request) -> None:
    """Called between two phases of a preparation."""
    if request.ended:
        raise EndedMeanwhile


def _let_others_run(request: Request) -> None:
    """Called now and then while a long prompt is hashed."""
    _raise_if_ended(request)
    # A thread that only runs Python gives the GIL away after 5 ms, too late for an event loop. A
    # sleep gives it away now, and is long enough for another thread to take it.
    time.sleep(50e-6)
