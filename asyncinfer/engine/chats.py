"""`Chats` renders chat messages to a prompt, and makes the readers of answers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from asyncinfer.engine.source import Loaded
from asyncinfer.engine.spoken import SpokenMessages
from asyncinfer.errors import InvalidRequest
from asyncinfer.text import ChatTemplate
from asyncinfer.text.messages import check_messages, joined
from asyncinfer.tools import ChatOptions, MessageReader, ToolFamily, family_of, without_tools
from asyncinfer.tools.delimiters import Delimiters

__all__ = ["Chats"]

#: Names of request options, which `template_options` must not use.
_TAKEN: Final = ("messages", "add_generation_prompt", "tools")
_PLAIN: Final = ChatOptions()


class Chats:
    """An engine's chat template and tool format. Immutable; safe from any thread."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    @cached_property
    def family(self) -> ToolFamily:
        """How the model writes reasoning and calls."""
        template = self._loaded.template
        if template is None:
            return family_of("", False)
        return family_of(template.source, template.reads_tools, template.response)

    @cached_property
    def delimiters(self) -> Delimiters:
        """The family's, with the model's tokenizer."""
        return Delimiters(self._loaded.tokenizer, self.family.texts())

    @property
    def _tells_tools(self) -> bool:
        template = self._loaded.template
        return template is not None and template.reads_tools

    def template(self) -> ChatTemplate:
        """Raises `InvalidRequest` where the model has none."""
        template = self._loaded.template
        if template is None:
            raise InvalidRequest("prompt", "chat messages", "this model has no chat template")
        return template

    def render(self, messages: Sequence[Any], options: ChatOptions | None) -> str:
        """The prompt, for `Tokenizer.encode_chat`. Raises `InvalidRequest`."""
        template, options = self.template(), options or _PLAIN
        for name in _TAKEN:
            if name in options.template_options:
                bound = "is no option of a template; the request has an option for it"
                raise InvalidRequest(f"template_options[{name!r}]", name, bound)
        given = dict(options.template_options)
        messages = [joined(message) for message in messages]

        def write(messages: Sequence[Any]) -> str:
            if options.continue_final_message:
                return _continued(template, messages, given)
            return template.render(messages, **given)

        if self._tells_tools:
            if options.tools:
                given["tools"] = [tool.definition for tool in options.tools]
            told = [_readable(message, self._write_arguments) for message in messages]
            try:
                return write(told)
            except InvalidRequest:
                # Some templates write each argument by itself, which is not to be had of a call
                # that was cut short.
                named = [_readable(message, self._name_arguments) for message in messages]
                if named == told:
                    raise
                return write(named)
        # Checked as they were given, so that an error names its place there.
        messages = check_messages(messages)
        try:
            return write(without_tools(messages, options.tools))
        except InvalidRequest:
            if not options.tools:
                raise
            # Some templates know no system message.
            return write(without_tools(messages, options.tools, system=False))

    def encode(self, messages: Sequence[Any], text: str, options: ChatOptions | None) -> list[int]:
        """Token ids of a chat that `render` made `text` of. Answers in a session keep the tokens
        that the model drew."""
        tokenizer = self._loaded.tokenizer
        answered = messages.answered if isinstance(messages, SpokenMessages) else None
        if answered is not None and answered.messages < len(messages):
            rest = self._after(messages, answered.messages - 1, options)
            if rest is not None:
                return [*answered.token_ids, *tokenizer.encode_chat(rest, inner=True)]
        return tokenizer.encode_chat(text)

    def _after(self, messages: Sequence[Any], at: int, options: ChatOptions | None) -> str | None:
        """The prompt from the end of the answer that is message `at`, including the token that ends
        it; None if that cannot be determined."""
        end = f"<end-{secrets.token_hex(8)}>"
        shown: list[Any] = [*messages]
        shown[at] = {"role": "assistant", **messages[at], "content": end}
        text = self.render(shown, options)
        begun = text.rfind(end)
        if begun < 0:
            return None
        text, eos_ids = text[begun + len(end) :], self._loaded.tokenizer.eos_ids
        added = self._loaded.tokenizer.added_tokens
        found = (text.find(token) for token, token_id in added.items() if token_id in eos_ids)
        first = min((place for place in found if place >= 0), default=None)
        if first is None:
            # The text after the answer; unknown where the template writes calls after it.
            return None if messages[at].get("tool_calls") else text
        return text[first:]

    def reader(
        self, messages: Sequence[Any], prompt: str, options: ChatOptions | None
    ) -> MessageReader | None:
        """The reader of answers to a prompt that `render` made of messages; None if any answer is
        plain content."""
        options = options or _PLAIN
        begun = joined(messages[-1]).get("content") if options.continue_final_message else ""
        family = self.family
        if not options.tools and family.reasoning is None and family.calls is not None:
            return None
        calls = family.calls
        none = options.tool_choice == "none" and calls is not None
        return MessageReader(
            family,
            self.delimiters,
            options.callable_tools,
            thinking=family.thinking(prompt, begun if isinstance(begun, str) else ""),
            must_call=options.must_call,
            parallel=options.parallel_tool_calls,
            barred=calls.opens if none and calls is not None else (),
        )

    @property
    def _takes_text(self) -> bool:
        """Whether the template takes arguments as JSON text."""
        return self.family.name.startswith("deepseek")

    def _name_arguments(self, arguments: Any) -> Any:
        """A call's arguments by name; none of a text that is no object."""
        written = self._write_arguments(arguments)
        return {} if isinstance(written, str) and not self._takes_text else written

    def _write_arguments(self, arguments: Any) -> Any:
        """A call's arguments as the template takes them: most take an object."""
        text = self._takes_text
        if not isinstance(arguments, str):
            return json.dumps(arguments, ensure_ascii=False) if text else arguments
        try:
            data = None if text else json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return data if isinstance(data, dict) else arguments


def _readable(message: Any, write: Callable[[Any], Any]) -> Any:
    """A message whose calls have arguments in the form that the template accepts."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call(call, write) for call in calls]}


def _call(call: Any, write: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": write(function["arguments"])}}


def _continued(template: ChatTemplate, messages: Sequence[Any], options: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message's content."""
    last = messages[-1] if messages else None
    content = last.get("content") if isinstance(last, Mapping) else None
    if last is None or last.get("role") != "assistant" or not isinstance(content, str):
        bound = "the last message must be the assistant's, with text as its content"
        raise InvalidRequest("continue_final_message", True, bound)
    # Templates strip and move contents, so the end is found by a marker that occurs nowhere else.
    end = f"<end-{secrets.token_hex(8)}>"
    shown = [*messages[:-1], {**last, "content": content + end}]
    text = template.render(shown, add_generation_prompt=False, **options)
    at = text.rfind(end)
    if at < 0:
        bound = "the chat template does not write the last message as it is"
        raise InvalidRequest("continue_final_message", True, bound)
    return text[:at]
