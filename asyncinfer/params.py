"""How one request is sampled: `SamplingParams`, checked when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncinfer.bounds import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARS,
    MAX_LOGPROBS,
    MAX_LOOP_TIMES,
    MAX_LOOP_TOKENS,
    MAX_N,
    MAX_STOP,
    MAX_STOP_CHARS,
    MAX_STOP_REGEX,
    MAX_STOP_REGEX_CHARS,
    MAX_TAG_CHARS,
    MAX_TOKENS,
)
from asyncinfer.checks import (
    Frozen,
    check_arguments,
    check_bias,
    check_boolean,
    check_integer,
    check_real,
    check_sampler,
    check_strings,
    check_text_messages,
    check_token_ids,
)
from asyncinfer.errors import InvalidRequest, Size
from asyncinfer.structured_output import (
    CONSTRAINTS,
    AnswerReader,
    check_closing,
    check_constraints,
)
from asyncinfer.suggestions import suggesting

__all__ = ["SamplingParams", "check_integer", "check_real"]

#: Below this a temperature acts as greedy: dividing logits by it could overflow.
GREEDY_BELOW = 1e-5


@suggesting("a request")
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options, in the field's own names. Every value is checked here; an unknown
    name is a `TypeError`, a value out of bounds an `InvalidRequest`.

    The chain runs in this order: guidance, `logit_bias`, `allowed_token_ids`, `bad_words`,
    structured output, `min_tokens` -> penalties -> `sampler` -> temperature -> top-k, top-p, min-p,
    typical -> draw.
    """

    #: Most tokens to generate; None: up to the end of the context, 0: the prompt is computed alone.
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
    #: The answer ends before the first of these strings; it is not part of the text. One that is a
    #: special token ends the answer as that token does, whose text is never shown.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: The answer ends before the first text that one of these regular expressions matches, in the
    #: syntax of `regex`. A match has at most 256 characters.
    stop_regex: tuple[str, ...] = ()
    #: Whether the text includes the stop string, or match of `stop_regex`, that ended the answer.
    include_stop: bool = False
    #: `(n, k)`: at most n tokens that come k times in a row end the answer with the finish reason
    #: "repetition".
    repetition_stop: tuple[int, int] | None = None
    #: Most tokens of the reasoning; then its closing tag is appended.
    thinking_budget: int | None = None
    #: The texts that open and close the reasoning. It is open from the start where the prompt ends
    #: with the opening one.
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    #: Whether answers go on past the model's end-of-text tokens.
    ignore_eos: bool = False
    #: Alternatives to report with each token's logprob; None reports no logprobs.
    logprobs: int | None = None
    #: Report each token's logprob, and those of these tokens as its alternatives.
    logprob_token_ids: tuple[int, ...] | None = None
    #: As `logprobs`, for the prompt's tokens.
    prompt_logprobs: int | None = None
    #: Added to the logits, token id -> bias.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    #: Classifier-free guidance (Sanchez et al., 2023): logits become `free + scale * (given -
    #: free)`, of the logprobs after the prompt and those after `negative_prompt`. 1 is off.
    guidance_scale: float = 1.0
    #: What the answer is guided away from: text, token ids, or chat messages, which are rendered
    #: like those of the prompt; None takes the prompt's last token.
    negative_prompt: str | tuple[int, ...] | tuple[Mapping[str, str], ...] | None = None
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
    #: Structured output: one of the next six at most. A JSON Schema, as a dict or a string; or a
    #: pydantic model or `TypeAdapter`, which then makes `Completion.parsed`.
    json_schema: object | None = None
    #: Any JSON object.
    json_object: bool = False
    #: The whole answer matches this regular expression.
    regex: str | None = None
    #: A context-free grammar, in Lark's syntax or in GBNF.
    grammar: str | None = None
    #: The answer is one of these strings.
    choice: tuple[str, ...] | None = None
    #: JSON between tags in free text: `{"structures": [{"begin", "schema", "end"}], "triggers"}`.
    structural_tag: object | None = None
    #: The text, such as "</think>", after which the constraint holds; free text comes before.
    constrain_after: str | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.max_tokens is not None:
            put(self, "max_tokens", check_integer("max_tokens", self.max_tokens, 0, MAX_TOKENS))
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
        put(self, "stop_regex", _patterns(self.stop_regex))
        put(self, "include_stop", check_boolean("include_stop", self.include_stop))
        if self.repetition_stop is not None:
            put(self, "repetition_stop", _loop(self.repetition_stop))
        if self.thinking_budget is not None:
            budget = check_integer("thinking_budget", self.thinking_budget, 1, MAX_TOKENS)
            put(self, "thinking_budget", budget)
        tags = check_strings("thinking_tags", self.thinking_tags, 2, MAX_TAG_CHARS)
        if len(tags) != 2:
            raise InvalidRequest("thinking_tags", tags, "must be an opening and a closing tag")
        put(self, "thinking_tags", tags)
        put(self, "ignore_eos", check_boolean("ignore_eos", self.ignore_eos))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(self, name, check_integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        if self.logprob_token_ids is not None:
            put(self, "logprob_token_ids", self._scored_ids(self.logprob_token_ids))
        put(self, "logit_bias", Frozen(check_bias("logit_bias", self.logit_bias)))
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
        put(self, "guidance_scale", check_real("guidance_scale", self.guidance_scale, 0.0, 100.0))
        if self.negative_prompt is not None:
            put(self, "negative_prompt", self._negative(self.negative_prompt))
        arguments = check_arguments("sampler_args", self.sampler_args)
        if arguments and self.sampler is None:
            raise InvalidRequest("sampler_args", arguments, "needs sampler=")
        put(self, "sampler_args", Frozen(arguments))
        put(self, "sampler", check_sampler(self.sampler))
        kept = check_constraints({name: getattr(self, name) for name in CONSTRAINTS})
        for name, value in kept.items():
            put(self, name, value)
        put(
            self,
            "constrain_after",
            check_closing("constrain_after", self.constrain_after, self.constraint is not None),
        )
        if self.thinking_budget is not None:
            self._check_thinking()

    @property
    def constraint(self) -> str | None:
        """Which of the options for structured output it has."""
        return next((name for name in CONSTRAINTS if getattr(self, name)), None)

    @property
    def json_reader(self) -> AnswerReader | None:
        """What reads its answers; None where they are not JSON."""
        if self.constraint not in ("json_schema", "json_object"):
            return None
        return AnswerReader(self.json_schema, self.constrain_after or "")

    @property
    def alternatives(self) -> int | None:
        """Alternatives that are reported with each token's logprob; None reports nothing."""
        ids = self.logprob_token_ids
        return self.logprobs if ids is None else len(ids)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` if a token id is not below `vocab_size`."""
        negative = () if isinstance(self.negative_prompt, str) else self.negative_prompt or ()
        for name, ids in (
            ("negative_prompt", [each for each in negative if isinstance(each, int)]),
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logprob_token_ids", self.logprob_token_ids or ()),
        ):
            if (most := max(ids, default=-1)) >= vocab_size:
                raise InvalidRequest(name, most, f"token ids must be < {vocab_size}")

    def _check_thinking(self) -> None:
        """Refuse logprobs, which an appended tag lacks, and a constraint on the reasoning."""
        if self.logprobs is not None or self.logprob_token_ids is not None:
            bound = "not with logprobs: an appended token has none"
            raise InvalidRequest("thinking_budget", self.thinking_budget, bound)
        after = self.thinking_tags[-1]
        if self.constraint is not None and self.constrain_after != after:
            bound = f"with structured output it needs constrain_after={after!r}"
            raise InvalidRequest("thinking_budget", self.thinking_budget, bound)

    def _negative(self, value: object) -> str | tuple[int, ...] | tuple[Mapping[str, str], ...]:
        name = "negative_prompt"
        if self.guidance_scale == 1:
            raise InvalidRequest(name, value, "needs a guidance_scale other than 1")
        if not isinstance(value, str | list | tuple) or not value:
            bound = "must be a string, a list of token ids or a list of chat messages, not empty"
            raise InvalidRequest(name, value, bound)
        if isinstance(value, str):
            return value
        if isinstance(value[0], Mapping):
            return check_text_messages(name, value)
        return check_token_ids(name, value)

    def _scored_ids(self, ids: Iterable[int]) -> tuple[int, ...]:
        name = "logprob_token_ids"
        if self.logprobs is not None:
            raise InvalidRequest(name, Size("a list"), "not with logprobs")
        checked = tuple(dict.fromkeys(check_token_ids(name, ids)))
        if not 1 <= len(checked) <= MAX_LOGPROBS:
            bound = f"must be 1 to {MAX_LOGPROBS} ids"
            raise InvalidRequest(name, Size(f"{len(checked)} ids"), bound)
        return checked


def _patterns(value: str | Iterable[str]) -> tuple[str, ...]:
    """The expressions of `stop_regex`; intake compiles them and refuses invalid ones."""
    return check_strings("stop_regex", value, MAX_STOP_REGEX, MAX_STOP_REGEX_CHARS)


def _loop(value: object) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise InvalidRequest("repetition_stop", value, "must be a pair (tokens, times)")
    tokens = check_integer("repetition_stop[0]", value[0], 1, MAX_LOOP_TOKENS)
    return tokens, check_integer("repetition_stop[1]", value[1], 2, MAX_LOOP_TIMES)
