"""The fields of request bodies: one table for reading them, refusing others, and the OpenAPI
document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from asyncinfer.errors import InvalidRequest
from asyncinfer.server.errors import FieldError
from asyncinfer.suggestions import suggestion

__all__ = [
    "ANY",
    "BOOLEAN",
    "CHAT",
    "COMPLETION",
    "INTEGER",
    "MESSAGES",
    "RESPONSES",
    "STRING",
    "Field",
    "Fields",
    "check_fields",
    "check_names",
    "field_list",
    "flag",
    "options_of",
    "sent_names",
]

Schema = Mapping[str, Any]

#: Characters of an unknown field that a message shows.
MOST_SHOWN: Final = 80

ANY: Final[Schema] = {}
NUMBER: Final[Schema] = {"type": "number"}
INTEGER: Final[Schema] = {"type": "integer"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
STRING: Final[Schema] = {"type": "string"}
OBJECT: Final[Schema] = {"type": "object"}
IDS: Final[Schema] = {"type": "array", "items": INTEGER}
STRINGS: Final[Schema] = {"type": "array", "items": STRING}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a request's body."""

    name: str
    schema: Schema
    about: str
    #: The option of `Engine.stream` that takes its value as it is; None where a handler reads it.
    option: str | None = None
    required: bool = False


class Fields(tuple[Field, ...]):
    """The fields that requests to one path may have, with the checks that all of these share."""

    names: frozenset[str]
    required: tuple[str, ...]
    #: Names of fields -> the engine options that take their values.
    options: Mapping[str, str]

    def __new__(cls, *fields: Field) -> Fields:
        made = super().__new__(cls, fields)
        made.names = frozenset(field.name for field in fields)
        made.required = tuple(field.name for field in fields if field.required)
        made.options = {f.name: f.option for f in fields if f.option is not None}
        return made


def _options(*rows: tuple[str, Schema, str]) -> tuple[Field, ...]:
    """Fields by the names of the engine's options."""
    return tuple(Field(name, schema, about, name) for name, schema, about in rows)


def _ignored(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, ANY, "Taken, and without effect.") for name in names)


_TOOLS: Final = _options(
    ("tools", {"type": "array", "items": OBJECT}, "Functions that the model may call."),
    ("tool_choice", ANY, "`auto`, `none`, `required`, or a tool by its name."),
    ("parallel_tool_calls", BOOLEAN, "Whether an answer may call several times."),
)
_TEMPLATE: Final = _options(
    ("template_options", OBJECT, "Variables of the chat template, such as `enable_thinking`."),
    ("continue_final_message", BOOLEAN, "Go on with the last message, the assistant's."),
)
#: Sampling options that OpenAI's protocols have too.
_SAMPLING: Final = _options(
    ("temperature", NUMBER, "0 takes the likeliest token."),
    ("top_p", NUMBER, "Draw from this share of the probability."),
    ("presence_penalty", NUMBER, "Subtracted from tokens that the answer has."),
    ("frequency_penalty", NUMBER, "The same for each time it has them."),
    ("seed", INTEGER, "The same seed gives the same answer."),
)
#: Options that only the engine has.
_OURS: Final = _options(
    ("top_k", INTEGER, "Draw from the k likeliest tokens."),
    ("min_p", NUMBER, "Drop tokens less likely than this, relatively."),
    ("typical_p", NUMBER, "Locally typical sampling."),
    ("repetition_penalty", NUMBER, "Above 1 discourages repetition."),
    ("min_tokens", INTEGER, "The answer does not end before."),
    ("stop_token_ids", IDS, "Tokens that end the answer."),
    ("ignore_eos", BOOLEAN, "Go on past the model's end of text."),
    ("allowed_token_ids", IDS, "Only these tokens may be drawn."),
    ("bad_words", STRINGS, "Strings that may not be generated."),
    ("sampler", ANY, "A sampler plugin's name, or a list."),
    ("sampler_args", OBJECT, "Its arguments."),
    ("regex", STRING, "The answer matches this regular expression."),
    ("grammar", STRING, "The answer is a sentence of this grammar."),
    ("choice", STRINGS, "The answer is one of these."),
    ("structural_tag", ANY, "JSON between tags in free text."),
    ("constrain_after", STRING, "The text after which a format holds."),
    ("guidance_scale", NUMBER, "How far the answer is guided away from `negative_prompt`."),
    ("negative_prompt", ANY, "A text, token ids, or messages; needs `guidance_scale`."),
    ("stop_regex", ANY, "The answer ends before a match of one of these."),
    ("repetition_stop", ANY, "`[n, k]`: the answer ends after n tokens, k times in a row."),
    ("thinking_budget", INTEGER, "Most tokens of the reasoning."),
    ("thinking_tags", ANY, "What begins and ends the reasoning."),
    ("stream_interval", INTEGER, "Tokens of an event."),
    ("deadline", NUMBER, "Seconds after which the request fails with 504."),
)
_COMMON: Final = (
    Field("model", STRING, "A name that /v1/models lists; without it, the first."),
    *_SAMPLING,
    Field("n", INTEGER, "Independent answers.", "n"),
    Field("stop", {"anyOf": [STRING, STRINGS]}, "The answer ends before.", "stop"),
    Field("logit_bias", OBJECT, "Added to the logits, token id to bias."),
    Field("stream", BOOLEAN, "Send the answer as events while it is made."),
    Field("stream_options", OBJECT, "`include_usage`: a last event with the usage."),
    *_OURS,
    *_ignored("user", "metadata", "store", "service_tier", "prompt_cache_key"),
    *_ignored("safety_identifier", "prompt_cache_retention", "prompt_cache_options"),
)

CHAT: Final = Fields(
    Field("messages", {"type": "array", "items": OBJECT}, "The chat.", required=True),
    *_COMMON,
    Field("max_completion_tokens", INTEGER, "Most tokens of an answer.", "max_tokens"),
    Field("max_tokens", INTEGER, "The same, by its old name."),
    Field("logprobs", BOOLEAN, "Give each token's logprob."),
    Field("top_logprobs", INTEGER, "And so many alternatives."),
    Field("response_format", OBJECT, "`text`, `json_object` or `json_schema`."),
    *_TOOLS,
    *_TEMPLATE,
    Field("prediction", OBJECT, "`content`: what the answer is expected to be."),
    Field("chat_template_kwargs", OBJECT, "The same, by another name.", "template_options"),
    *_ignored("modalities", "reasoning_effort", "verbosity"),
)
COMPLETION: Final = Fields(
    Field("prompt", ANY, "A text, token ids, or a list of either.", required=True),
    *_COMMON,
    Field("max_tokens", INTEGER, "Most tokens of an answer; 16 without it."),
    Field("logprobs", INTEGER, "Give logprobs, and so many alternatives.", "logprobs"),
    Field("echo", BOOLEAN, "The answer's text begins with the prompt."),
    Field("best_of", INTEGER, "Must equal `n`."),
)

MESSAGES: Final = Fields(
    Field("messages", {"type": "array", "items": OBJECT}, "The chat.", required=True),
    Field("model", STRING, "A name that /v1/models lists; without it, the first."),
    Field("max_tokens", INTEGER, "Most tokens of an answer.", "max_tokens"),
    Field("system", ANY, "A text, or text blocks."),
    Field("stop_sequences", STRINGS, "The answer ends before.", "stop"),
    Field("stream", BOOLEAN, "Send the answer as events while it is made."),
    Field("output_config", OBJECT, "`format`: a JSON Schema that the answer fits."),
    Field("tools", {"type": "array", "items": OBJECT}, "Tools that the model may call."),
    Field("tool_choice", OBJECT, "Of type `auto`, `any`, `none` or `tool`."),
    *_TEMPLATE,
    *_SAMPLING,
    *(field for field in _OURS if field.name not in ("stop_regex", "repetition_stop")),
    *_ignored("metadata", "service_tier", "thinking", "cache_control", "inference_geo"),
    *_ignored("context_management", "speed", "diagnostics"),
)

RESPONSES: Final = Fields(
    Field("input", ANY, "A text, or items of a conversation.", required=True),
    Field("model", STRING, "A name that /v1/models lists; without it, the first."),
    Field("instructions", STRING, "The system's message."),
    Field("max_output_tokens", INTEGER, "Most tokens of an answer.", "max_tokens"),
    Field("stream", BOOLEAN, "Send the answer as events while it is made."),
    Field("text", OBJECT, "`format`: `text`, `json_object` or `json_schema`."),
    Field("top_logprobs", INTEGER, "Give logprobs, and so many alternatives."),
    Field("include", STRINGS, "`message.output_text.logprobs`."),
    *_TOOLS,
    *_TEMPLATE,
    *_SAMPLING,
    *_OURS,
    *_ignored("metadata", "store", "service_tier", "prompt_cache_key", "truncation", "reasoning"),
    *_ignored("safety_identifier", "prompt_cache_retention", "prompt_cache_options", "user"),
    *_ignored("background", "previous_response_id", "conversation", "prompt", "max_tool_calls"),
    *_ignored("stream_options"),
)


def check_fields(body: Mapping[str, Any], fields: Fields) -> None:
    """Raise `FieldError` for a missing field and for an unknown one."""
    for name in fields.required:
        if name not in body:
            raise FieldError(name, None, "is missing")
    if not body.keys() <= fields.names:
        name = next(name for name in body if name not in fields.names)
        bound = f"is no field of this request{suggestion(name, [each.name for each in fields])}"
        raise FieldError(name[:MOST_SHOWN], body[name], bound)


def check_names(field: str, value: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise `InvalidRequest` for a name within an object of a body that is none of `names`: it
    would be without effect."""
    for name, given in value.items():
        if name not in names and given is not None:
            bound = f"is none of its fields, {', '.join(names)}{suggestion(name, names)}"
            raise InvalidRequest(f"{field}.{name[:MOST_SHOWN]}", given, bound)


def options_of(body: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """The options of `Engine.stream` in a body, without those that a handler reads itself. Raises
    `FieldError` for two names of one option."""
    sent: dict[str, str] = {}
    for name in body:
        option = fields.options.get(name)
        if option is not None and (other := sent.setdefault(option, name)) != name:
            raise FieldError(name, body[name], f"{other} is the same by another name")
    found = {option: body[name] for option, name in sent.items()}
    if "logit_bias" in body:
        found["logit_bias"] = _bias(body["logit_bias"])
    return found


def sent_names(body: Mapping[str, Any], fields: Fields) -> dict[str, str]:
    """Options of `Engine.stream` -> the fields of a body that `options_of` has them from."""
    return {fields.options[name]: name for name in body if name in fields.options}


def flag(body: Mapping[str, Any], name: str) -> bool:
    """The field's boolean, False where it is missing. Raises `FieldError`."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise FieldError(name, value, "must be true or false")
    return value


def field_list(body: Mapping[str, Any], name: str) -> list[Any]:
    """The field's list, empty where it is missing. Raises `FieldError`."""
    value = body.get(name, [])
    if not isinstance(value, list):
        raise FieldError(name, value, "must be a list")
    return value


def _bias(value: Any) -> dict[int, Any]:
    """`logit_bias` by token id: names in JSON are strings."""
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias", value, "must map token ids to numbers")
    found: dict[int, Any] = {}
    with suppress(TypeError, ValueError):
        found = {int(name): bias for name, bias in value.items()}
    # `int` reads "05" and "1_0" as well, so that two names could be one token.
    if {*map(str, found)} != {*map(str, value)}:
        raise InvalidRequest("logit_bias", value, "its names must be token ids")
    return found
