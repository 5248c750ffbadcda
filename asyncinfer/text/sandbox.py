"""The jinja2 environment of chat templates, which come from a stranger's repository.

Immutable, sandboxed and bounded; what it offers beyond jinja2 is what the hub's templates expect
(transformers, `utils/chat_template_utils.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncinfer.text.bounds import CountingNodes, bounded_filters, check_binop, check_call, finalize

__all__ = ["TEMPLATE_GLOBALS", "TemplateEnvironment"]


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. Holds no state of a rendering; safe from any thread."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=finalize,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _tojson
        # They write at any length, and no chat needs them.
        for name in ("pprint", "urlize", "wordwrap", "xmlattr"):
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters.update(bounded_filters(self))
        self.filters.update(CountingNodes.FILTERS)
        self.globals.update(TEMPLATE_GLOBALS)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        CountingNodes().visit(template)
        template.set_environment(self)
        return template

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # jinja2 would hand out an undefined value here, which prints as nothing.
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_binop(context, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        check_call(context, obj, args, kwargs)
        return super().call(context, obj, *args, **kwargs)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class says so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which no model expects.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


TEMPLATE_GLOBALS: dict[str, Callable[..., Any]] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
