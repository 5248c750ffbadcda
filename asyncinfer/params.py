"""How one request is sampled: `SamplingParams`, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from asyncinfer.errors import InvalidRequest

__all__ = ["SamplingParams", "check_integer", "check_real"]

MAX_N = 128
MAX_LOGPROBS = 128
MAX_STOP = 64
MAX_STOP_CHARS = 4096
MAX_TOKEN_LIST = 65_536
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
MAX_TOKENS = 2**31 - 1
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
    #: No stop token and no stop string ends the answer before this many tokens. A stop string that
    #: begins before and is complete only after them does, and is not part of the text.
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
    #: A sampler plugin, by name (with `sampler_args`) or as its parameters; None is the built-in
    #: chain alone.
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
        put(self, "stop", _strings("stop", self.stop, MAX_STOP, MAX_STOP_CHARS))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put(self, "ignore_eos", _boolean("ignore_eos", self.ignore_eos))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(self, name, check_integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        put(self, "logit_bias", _bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequest("allowed_token_ids", (), "must name at least one token")
            put(self, "allowed_token_ids", allowed)
        put(
            self,
            "bad_words",
            _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
        )
        put(self, "n", check_integer("n", self.n, 1, MAX_N))
        if not isinstance(self.sampler_args, Mapping):
            raise InvalidRequest("sampler_args", self.sampler_args, "must be a mapping")
        if self.sampler_args and self.sampler is None:
            raise InvalidRequest("sampler_args", self.sampler_args, "needs sampler=")
        put(self, "sampler_args", _Frozen(self.sampler_args))

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
            for token in ids:
                if token >= vocab_size:
                    raise InvalidRequest(name, token, f"token ids must be < {vocab_size}")


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int, or `InvalidRequest` unless it is an integer in `[low, high]`."""
    # bool is an int in Python, and `max_tokens=True` is a mistake, not a 1.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequest(name, value, "must be an integer")
    number = int(value)
    if not low <= number <= high:
        raise InvalidRequest(name, value, f"must be between {low} and {high}")
    return number


def check_real(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> float:
    """`value` as a float, or `InvalidRequest` unless it is a finite number in `[low, high]` (with
    `open_low` in `(low, high]`)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(name, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        # An integer beyond every float.
        number = math.inf
    # A NaN passes any pair of comparisons written as "too low or too high".
    if not math.isfinite(number):
        raise InvalidRequest(name, value, "must be finite")
    if number < low or number > high or (open_low and number == low):
        if math.isinf(high):
            raise InvalidRequest(name, value, f"must be {'>' if open_low else '>='} {low:g}")
        bracket = "(" if open_low else "["
        raise InvalidRequest(name, value, f"must be in {bracket}{low:g}, {high:g}]")
    return number


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, value, "must be True or False")
    return value


def _strings(name: str, value: str | Iterable[str], most: int, chars: int) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _listed(name, value)
    if len(items) > most:
        raise InvalidRequest(name, f"{len(items)} entries", f"at most {most}")
    for item in items:
        if not isinstance(item, str) or not item:
            raise InvalidRequest(name, item, "must be non-empty strings")
        if len(item) > chars:
            raise InvalidRequest(name, item, f"at most {chars} characters each")
        if any("\ud800" <= char <= "\udfff" for char in item):
            raise InvalidRequest(name, item, "a lone surrogate is no text")
    return items


def _token_ids(name: str, value: Iterable[int]) -> tuple[int, ...]:
    items = _listed(name, value)
    if len(items) > MAX_TOKEN_LIST:
        raise InvalidRequest(name, f"{len(items)} entries", f"at most {MAX_TOKEN_LIST}")
    return tuple(check_integer(name, item, 0, MAX_TOKENS) for item in items)


def _bias(value: Mapping[int, float]) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequest("logit_bias", value, "must map token ids to biases")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequest("logit_bias", f"{len(value)} entries", f"at most {MAX_LOGIT_BIAS}")
    checked = {
        check_integer("logit_bias", token, 0, MAX_TOKENS): check_real("logit_bias", bias, -1e4, 1e4)
        for token, bias in value.items()
    }
    return _Frozen(checked)


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset | range):
        raise InvalidRequest(name, value, "must be a list")
    return tuple(value)
