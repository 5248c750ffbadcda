"""`ChatTemplate`: turns messages into one prompt, by the template that comes with a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncinfer.errors import InvalidRequest
from asyncinfer.text.caller_text import caller_text_class
from asyncinfer.text.compiled_template import CompiledTemplate
from asyncinfer.text.messages import check_messages, plain
from asyncinfer.text.render_budget import RenderBudget
from asyncinfer.text.sandbox import TEMPLATE_GLOBALS
from asyncinfer.text.shield import Shield
from asyncinfer.text.template_files import response_template, template_sources
from asyncinfer.text.tokenizer_files import ROLES, special_tokens

__all__ = ["ChatTemplate"]

#: Variables that `render` sets itself.
_OWN: Final = frozenset({"messages", "add_generation_prompt", *ROLES, *TEMPLATE_GLOBALS})
#: Variables that are None if they are not given, as in transformers.
_NONE: Final = {"tools": None, "documents": None}
#: Roles that programs use. They are not marked as the caller's text, since templates make control
#: tokens of them.
_SPEAKERS: Final = frozenset(
    [
        *("assistant", "context", "developer", "environment", "function", "ipython", "model"),
        *("observation", "system", "tool", "tool_response", "user"),
    ]
)


class ChatTemplate:
    """A chat template as the hub defines it (jinja2). Immutable; safe from any thread."""

    def __init__(
        self,
        source: str | None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        shield: Shield | None = None,
        response: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            source: the template; None: the model has none. If it is None, empty or does not
                compile, every chat is refused with the reason.
            special_tokens: names such as `bos_token` to text.
            tool_source: the template to use when tools are given, if it is another one.
            shield: of the tokenizer. Messages and options are marked by it for
                `Tokenizer.encode_chat`: against special tokens, and in all but the assistant's
                messages against any token that the template names.
            response: the checkpoint's `response_template`, which describes answers.
        """
        self._given = (source, special_tokens, tool_source, shield, response)
        self.response = response
        self._default = CompiledTemplate(source)
        self._for_tools = self._default if tool_source is None else CompiledTemplate(tool_source)
        self._special_tokens = dict(special_tokens or {})
        self._own: Callable[[str], str] = str
        self._strict: Callable[[str], str] = str
        self._shield = None if shield is None else shield.naming(source, tool_source)
        if shield is not None and self._shield is not None:
            self._own, self._strict = caller_text_class(shield), caller_text_class(self._shield)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its arguments, since it creates classes of its own."""
        return _made, self._given

    @classmethod
    def from_folder(cls, path: Path, shield: Shield | None = None) -> ChatTemplate:
        """The templates of a checkpoint. Raises `ModelLoadError` if a file cannot be read."""
        sources = template_sources(path)
        return cls(
            sources.get("default"),
            tool_source=sources.get("tool_use"),
            special_tokens=special_tokens(path),
            shield=shield,
            response=response_template(path),
        )

    def __bool__(self) -> bool:
        """Whether the model has a template that can be used."""
        return self._default.fault is None

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong with the model's templates."""
        given = [it for it in (self._default, self._for_tools) if it.source is not None]
        faults = dict.fromkeys(it.fault for it in given)
        return tuple(f"{fault}; chats are refused" for fault in faults if fault is not None)

    @property
    def source(self) -> str:
        """The text of the template that tools are written by; empty without one."""
        return self._for_tools.source or ""

    @property
    def reads_tools(self) -> bool:
        """Whether the template writes the tools of a request."""
        return "tools" in self._for_tools.names

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
        template = self._default if options.get("tools") is None else self._for_tools

        def text_of(role: str) -> Callable[[str], str]:
            return self._own if role == "assistant" else self._strict

        checked = check_messages(messages, text_of)
        roles = [str.__str__(message["role"]) for message in checked]
        if template.fault is not None:
            raise InvalidRequest(
                "messages", roles, f"{template.fault}; give the prompt as text or token ids"
            )
        for message, role in zip(checked, roles, strict=True):
            if role in _SPEAKERS or (role.isidentifier() and role in template.words):
                message["role"] = role
        values = {name: plain(name, value, self._strict) for name, value in options.items()}
        known = template.names - _OWN - self._special_tokens.keys()
        for name in values.keys() - known:
            listed = ", ".join(sorted(known)) or "none"
            raise InvalidRequest(
                name, options[name], f"the chat template reads no such option; it reads: {listed}"
            )
        own = {"messages": checked, "add_generation_prompt": bool(add_generation_prompt)}
        variables = _NONE | self._special_tokens | values | own
        if self._shield is None:
            return template.render(variables, roles, RenderBudget())
        return template.render(variables, roles, RenderBudget(self._strict, self._shield.guarded))


def _made(
    source: str | None,
    special_tokens: Mapping[str, str] | None,
    tool_source: str | None,
    shield: Shield | None,
    response: Mapping[str, Any] | None,
) -> ChatTemplate:
    return ChatTemplate(
        source,
        special_tokens=special_tokens,
        tool_source=tool_source,
        shield=shield,
        response=response,
    )
