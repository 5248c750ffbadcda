"""`Formats` makes matchers from a request's options for structured output."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from asyncinfer.errors import InvalidRequest, Size, renaming
from asyncinfer.grammar import GrammarCompiler, Matcher, check_ends, check_values
from asyncinfer.params import SamplingParams
from asyncinfer.structured_output import AnswerFormat, is_typed, schema_of
from asyncinfer.tools import MessageReader
from asyncinfer.tools.schemas import with_known_formats

__all__ = ["Formats"]


class Formats:
    """Makes the matchers of an engine's requests.

    Args:
        able: whether the model's runner restricts draws.
    """

    def __init__(self, grammars: GrammarCompiler, able: bool) -> None:
        self._grammars = grammars
        self._able = able
        #: Schemas of pydantic types, which take longer to make than to compile.
        self._schemas: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def at_hand(self, params: SamplingParams) -> bool:
        """Whether `matchers` takes microseconds, and so may run on an event loop."""
        if params.constraint is None:
            return True
        schema = params.json_schema
        if is_typed(schema) and not (_is_kept(schema) and schema in self._schemas):
            return False
        return self._grammars.at_hand(self._format(params))

    def for_calls(
        self,
        message: MessageReader,
        params: SamplingParams,
        most_forced: int,
        on_compiled: Callable[[float], object],
    ) -> list[Matcher | None]:
        """A matcher for each answer to a chat, whose calls fit their tools; None where there are no
        tools, or where the answer may be text and has a thinking budget. An answer that has a
        format as well fits it where it does not call. Raises `InvalidRequest`."""
        content = self._content(params)
        form = message.grammar(content)
        exact = message.must_call or content is not None
        if form is None or (params.thinking_budget is not None and not exact):
            return [None] * params.n
        if params.thinking_budget is not None:
            value = Size("beside a required call")
            raise InvalidRequest("thinking_budget", value, "one of them only")
        if not self._able:
            raise InvalidRequest("tools", Size("a list"), "this model restricts no draws")
        for name, tool in message.tools.items():
            if not self._grammars.at_hand(form):
                check_ends(f"tools/{name}", tool.schema)
            if exact:
                check_values(f"tools/{name}", tool.schema)
        if content is not None and not self._grammars.at_hand(form):
            # By itself it tells what is wrong with it.
            self._grammars.matchers(self._format(params), 0, 0)
        most = _most_forced(params, most_forced)
        try:
            return [*self._grammars.matchers(form, params.n, most, on_compiled)]
        except InvalidRequest:
            wrong = self._wrong(message)
            if exact:
                for error in wrong.values():
                    raise error from None
                raise
        # Calls that may be left out are held to what can be held of their schemas.
        loose = message.loosened(wrong)
        for error in self._wrong(loose).values():
            raise error
        form = loose.grammar()
        if form is None:
            return [None] * params.n
        try:
            return [*self._grammars.matchers(form, params.n, most, on_compiled)]
        except InvalidRequest:
            # It takes too much work, so calls are only read.
            return [None] * params.n

    def _content(self, params: SamplingParams) -> Mapping[str, Any] | None:
        """The schema of answers that call no tool; None without one."""
        if params.constraint is None:
            return None
        if params.constraint not in ("json_schema", "json_object"):
            bound = "with tools it must be json_schema or json_object"
            raise InvalidRequest(params.constraint, Size("beside tools"), bound)
        if params.constrain_after is not None:
            raise InvalidRequest("constrain_after", params.constrain_after, "not with tools")
        found: Mapping[str, Any] = json.loads(self._format(params).text)
        return found

    def _wrong(self, message: MessageReader) -> dict[str, InvalidRequest]:
        """What is wrong with tools, by their names. By itself a schema tells whether and where it
        is wrong. Where each argument is written by itself, so does one that may be left out."""
        found: dict[str, InvalidRequest] = {}
        for name, tool in message.tools.items():
            named = tool.schema.get("properties", {})
            required = [key for key, one in named.items() if one is not False]
            for schema in (tool.schema, {**tool.schema, "required": required}):
                form = AnswerFormat("json_schema", json.dumps(with_known_formats(schema)))
                try:
                    with renaming("json_schema", f"tools/{name}"):
                        self._grammars.matchers(form, 0, 0)
                except InvalidRequest as error:
                    found.setdefault(name, error)
        return found

    def chars(self, params: SamplingParams) -> int:
        """Characters of the format that the answers have to fit; 0 without one."""
        return 0 if params.constraint is None else len(self._format(params).text)

    def matchers(
        self,
        params: SamplingParams,
        message: MessageReader | None,
        most_forced: int,
        on_compiled: Callable[[float], object],
    ) -> list[Matcher | None]:
        """A matcher for each answer, at its start; None where all text fits. Answers to a chat,
        which `message` reads, may reason before. `on_compiled`: see `GrammarCompiler.matchers`.
        Raises `InvalidRequest`."""
        if params.constraint is None:
            return [None] * params.n
        if not self._able:
            value = getattr(params, params.constraint)
            raise InvalidRequest(params.constraint, value, "this model restricts no draws")
        most = _most_forced(params, most_forced)
        form = self._format(params)
        if message is not None:
            form = message.after_reasoning(form)
        return [*self._grammars.matchers(form, params.n, most, on_compiled)]

    def _format(self, params: SamplingParams) -> AnswerFormat:
        kind, after = params.constraint, params.constrain_after or ""
        assert kind is not None
        value = getattr(params, kind)
        if kind == "json_object":
            return AnswerFormat("json_schema", '{"type": "object"}', after)
        if kind == "choice":
            return AnswerFormat(kind, json.dumps(value), after)
        if kind == "json_schema" and is_typed(value):
            value = self._schema_text(value)
        return AnswerFormat(kind, value, after)

    def _schema_text(self, typed: Any) -> str:
        if not _is_kept(typed):
            return schema_of(typed)
        if typed not in self._schemas:
            self._schemas[typed] = schema_of(typed)
        return self._schemas[typed]


def _most_forced(params: SamplingParams, most: int) -> int:
    # Nothing is forced where each token needs a logprob or a sampler's draw, or may be barred.
    drawn = params.alternatives is not None or params.sampler is not None
    drawn |= params.allowed_token_ids is not None or params.bad_words != ()
    return 0 if drawn else most


def _is_kept(typed: Any) -> bool:
    """Whether `typed` is a key of the kept schemas: a type without a hash cannot be one."""
    return isinstance(typed, Hashable) and hasattr(typed, "__weakref__")
