"""`ChatTemplate`: messages to one prompt, by the template that comes with a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import meta

from asyncinfer.errors import InvalidRequest, ModelLoadError
from asyncinfer.text.bounds import Allowance
from asyncinfer.text.files import ROLES, file_of, read_json, token_content
from asyncinfer.text.messages import check_messages, plain
from asyncinfer.text.sandbox import TEMPLATE_GLOBALS, TemplateEnvironment
from asyncinfer.text.shield import Shield

__all__ = ["ChatTemplate"]

#: Most characters a template may write.
MAX_CHARS: Final = 64_000_000
#: Variables that `render` sets itself.
_OWN: Final = {"messages", "add_generation_prompt", *ROLES, *TEMPLATE_GLOBALS}


class ChatTemplate:
    """A chat template as the hub defines it (jinja2). Immutable; safe from any thread."""

    def __init__(
        self,
        source: str | None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        shield: Shield | None = None,
    ) -> None:
        """`source` is None for a model without a template: rendering is refused, nothing else.
        `special_tokens` maps names such as `bos_token` to text; `tool_source` is the template to
        use when tools are given, if it is another one. With the `shield` of a tokenizer, messages
        and options are covered by it, and `Tokenizer.encode_chat` knows; and but for what the
        assistant said, they are covered from the tokens that the template names, special or not."""
        self._source = source
        self._tool_source = tool_source
        self._special_tokens = dict(special_tokens or {})
        self._shield = shield
        self._strict = None if shield is None else shield.naming(source, tool_source)

    @classmethod
    def from_folder(cls, path: Path, shield: Shield | None = None) -> ChatTemplate:
        """Read `chat_template.jinja`, or `chat_template` of `tokenizer_config.json` (one template
        or several with names). Raises `ModelLoadError` if a file cannot be read."""
        settings = read_json(path, "tokenizer_config.json")
        tokens = {role: token_content(settings.get(role)) for role in ROLES}
        named = _named(path / "tokenizer_config.json", settings.get("chat_template"))
        own = file_of(path, "chat_template.jinja")
        if own is not None:
            try:
                named["default"] = own.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelLoadError(f"not readable: {error}", file=str(own)) from error
        return cls(
            named.get("default"),
            tool_source=named.get("tool_use"),
            special_tokens={role: token for role, token in tokens.items() if token is not None},
            shield=shield,
        )

    def __bool__(self) -> bool:
        """Whether the model has a template."""
        return self._source is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The prompt for `messages`, for `Tokenizer.encode_chat`.

        `options` are the variables the template itself reads (`tools`, `enable_thinking`...), as
        plain data; any other name is refused. Every error is an `InvalidRequest`.
        """
        checked = check_messages(messages)
        values = {name: plain(name, value) for name, value in options.items()}
        template = self._tool_template if values.get("tools") else self._template
        if template is None:
            raise InvalidRequest(
                "messages",
                [message["role"] for message in checked],
                "this model has no chat template; give the prompt as text or token ids",
            )
        for name in values:
            if name not in template.options:
                known = ", ".join(sorted(template.options)) or "none"
                raise InvalidRequest(
                    name, values[name], f"the chat template reads no such option; it reads: {known}"
                )
        if self._shield is not None and self._strict is not None:
            for index, message in enumerate(checked):
                shield = self._shield if message["role"] == "assistant" else self._strict
                checked[index] = shield.cover(f"messages[{index}]", message)
            values = {name: self._strict.cover(name, value) for name, value in values.items()}
        values |= self._special_tokens
        values |= {"messages": checked, "add_generation_prompt": bool(add_generation_prompt)}
        return template.render(values)

    @cached_property
    def _template(self) -> _Template | None:
        # Compiled when first used: prompts that are plain text need no valid template.
        return None if self._source is None else _Template(self._source)

    @cached_property
    def _tool_template(self) -> _Template | None:
        return self._template if self._tool_source is None else _Template(self._tool_source)


class _Template:
    """One compiled template and the options it reads."""

    def __init__(self, source: str) -> None:
        environment = TemplateEnvironment()
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidRequest(
                "messages", "chat", f"the model's chat template does not compile: {error}"
            ) from error
        self.options: frozenset[str] = frozenset(names - _OWN - environment.globals.keys())

    def render(self, values: dict[str, Any]) -> str:
        try:
            return "".join(
                _bounded(self._template.generate(values | {Allowance.NAME: Allowance()}))
            )
        except InvalidRequest:
            raise
        except Exception as error:
            # The template is a stranger's program: whatever it raises, this request is at fault.
            reason = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            raise InvalidRequest(
                "messages",
                [message["role"] for message in values["messages"]],
                f"the chat template refuses them: {reason}",
            ) from error


def _bounded(parts: Iterator[str]) -> Iterator[str]:
    length = 0
    for part in parts:
        length += len(part)
        if length > MAX_CHARS:
            raise InvalidRequest(
                "messages", f"{length} characters", f"the chat may write at most {MAX_CHARS}"
            )
        yield part


def _named(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else [value]
    named: dict[str, str] = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(source)}:
                named[name] = source
            case _:
                raise ModelLoadError(
                    "chat_template must be a string or a list of {name, template}", file=str(path)
                )
    return named
