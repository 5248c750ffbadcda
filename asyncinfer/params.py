"""How one request is sampled: `SamplingParams`, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncinfer.bounds import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SAMPLER_NAME,
    MAX_SAMPLERS,
    MAX_STOP,
    MAX_STOP_CHARS,
    MAX_TOKENS,
)
from asyncinfer.checks import (
    check_arguments,
    check_bias,
    check_boolean,
    check_integer,
    check_real,
    check_strings,
    check_token_ids,
)
from asyncinfer.errors import InvalidRequest, Size

__all__ = ["SamplingParams", "check_integer", "check_real"]

#: Below this a temperature acts as greedy: dividing logits by it could overflow.
GREEDY_BELOW = 1e-5


class _Frozen(dict[Any, Any]):
    """A mapping that is read-only, hashable and picklable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __setitem__(self, *_: object) -> None:
        raise TypeError("sampling parameters are frozen")

    __delitem__ = __setitem__
    __ior__ = clear = pop = popitem = setdefault = update = __setitem__  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[_Frozen], tuple[dict[Any, Any]]]:
        return _Frozen, (dict(self),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options, in the field's own names. Every value is checked here; an unknown
    name is a `TypeError`, a value out of bounds an `InvalidRequest`.

    The chain runs in this order: `logit_bias`, `allowed_token_ids`, `bad_words`, `min_tokens`
    -> penalties -> temperature -> top-k, top-p, min-p, typical -> draw.
    """

    #: Most tokens to generate; None goes on to the end of the context.
    max_tokens: int | None = None
    #: No stop token or stop string ends the answer before this many tokens. A stop string that
    #: begins before and is complete only after them does end it.
    min_tokens: int = 0
    #: 0 (or below 1e-5) is greedy.
    temperature: float = 1.0
    #: Keep the k most likely tokens; 0 keeps all.
    top_k: int = 0
    #: Nucleus sampling (Holtzman et al., 2020): the smallest set with this much mass.
    top_p: float = 1.0
    #: Keep tokens at least this fraction as likely as the most likely one.
    min_p: float = 0.0
    #: Locally typical sampling (Meister et al., 2023): mass of the kept set.
    typical_p: float = 1.0
    #: CTRL's penalty (Keskar et al., 2019): over prompt and answer, 1 is off.
    repetition_penalty: float = 1.0
    #: Subtracted once from every token already in the answer.
    presence_penalty: float = 0.0
    #: Subtracted per occurrence in the answer.
    frequency_penalty: float = 0.0
    #: Equal seeds give equal tokens, whatever else is in the batch. None draws one.
    seed: int | None = None
    #: The answer ends before the first of these strings; it is not part of the text.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: Go on past the model's end-of-text tokens.
    ignore_eos: bool = False
    #: Give each token's logprob and this many alternatives; None gives none.
    logprobs: int | None = None
    #: The same for the prompt's tokens.
    prompt_logprobs: int | None = None
    #: Added to the logits, token id -> bias.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    #: Only these tokens may be drawn.
    allowed_token_ids: tuple[int, ...] | None = None
    #: Strings that may not be generated (as token sequences, with and without a space before).
    bad_words: tuple[str, ...] = ()
    #: How many independent answers.
    n: int = 1
    #: A sampler plugin: a name (with `sampler_args`), a pair (name, arguments) or its parameters as
    #: an object; or a list of these, which are called in this order. None is the built-in chain
    #: alone.
    sampler: object | None = None
    sampler_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.max_tokens is not None:
            put(self, "max_tokens", check_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS))
        put(self, "min_tokens", check_integer("min_tokens", self.min_tokens, 0, MAX_TOKENS))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens", self.min_tokens, f"must be <= max_tokens={self.max_tokens}"
            )
        put(self, "temperature", check_real("temperature", self.temperature, 0.0, 1e6))
        put(self, "top_k", check_integer("top_k", self.top_k, 0, MAX_TOKENS))
        put(self, "top_p", check_real("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put(self, "min_p", check_real("min_p", self.min_p, 0.0, 1.0))
        put(self, "typical_p", check_real("typical_p", self.typical_p, 0.0, 1.0, open_low=True))
        put(
            self,
            "repetition_penalty",
            check_real("repetition_penalty", self.repetition_penalty, 1e-3, 1e3),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            put(self, name, check_real(name, getattr(self, name), -100.0, 100.0))
        if self.seed is not None:
            put(self, "seed", check_integer("seed", self.seed, -(2**63), 2**64 - 1))
        put(self, "stop", check_strings("stop", self.stop, MAX_STOP, MAX_STOP_CHARS))
        put(self, "stop_token_ids", check_token_ids("stop_token_ids", self.stop_token_ids))
        put(self, "ignore_eos", check_boolean("ignore_eos", self.ignore_eos))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(self, name, check_integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        put(self, "logit_bias", _Frozen(check_bias("logit_bias", self.logit_bias)))
        if self.allowed_token_ids is not None:
            allowed = check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequest("allowed_token_ids", (), "must name at least one token")
            put(self, "allowed_token_ids", allowed)
        put(
            self,
            "bad_words",
            check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
        )
        if (chars := sum(map(len, self.bad_words))) > MAX_BAD_WORDS_CHARS:
            bound = f"at most {MAX_BAD_WORDS_CHARS} characters together"
            raise InvalidRequest("bad_words", Size(f"{chars} characters"), bound)
        put(self, "n", check_integer("n", self.n, 1, MAX_N))
        arguments = check_arguments("sampler_args", self.sampler_args)
        if arguments and self.sampler is None:
            raise InvalidRequest("sampler_args", arguments, "needs sampler=")
        put(self, "sampler_args", _Frozen(arguments))
        put(self, "sampler", _sampler(self.sampler))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` if a token id is not below `vocab_size`."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            if (most := max(ids, default=-1)) >= vocab_size:
                raise InvalidRequest(name, most, f"token ids must be < {vocab_size}")


def _sampler(value: object) -> object:
    """With tuples in the place of lists, and its arguments frozen."""
    if not isinstance(value, list | tuple):
        return _named(value)
    if not value:
        raise InvalidRequest("sampler", value, "must name at least one sampler")
    if len(value) > MAX_SAMPLERS:
        raise InvalidRequest("sampler", Size(f"{len(value)} entries"), f"at most {MAX_SAMPLERS}")
    return tuple(_frozen(entry) if isinstance(entry, Mapping) else _pair(entry) for entry in value)


def _pair(entry: object) -> object:
    match entry:
        case (name, Mapping() as args) if isinstance(entry, list | tuple):
            return _named(name), _frozen(args)
    return _named(entry)


def _frozen(arguments: Mapping[str, Any]) -> _Frozen:
    return _Frozen(check_arguments("sampler", arguments))


def _named(value: object) -> object:
    if isinstance(value, str) and len(value) > MAX_SAMPLER_NAME:
        raise InvalidRequest("sampler", value, f"at most {MAX_SAMPLER_NAME} characters")
    return value
