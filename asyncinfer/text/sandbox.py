"""The jinja2 environment of chat templates, which may be hostile.

It is immutable, sandboxed and bounded. Its additions to jinja2 are those that the hub's templates
expect (transformers, `utils/chat_template_utils.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from asyncinfer.text.caller_text import CallerText
from asyncinfer.text.counting import COUNTERS, CountingNodes, written
from asyncinfer.text.filters import bounded_filters, bounded_tests
from asyncinfer.text.operators import call_method, operate
from asyncinfer.text.render_budget import RenderBudget

__all__ = ["TEMPLATE_GLOBALS", "TemplateEnvironment"]

_ADDED: Final = ("_loop_vars", "_block_vars")
#: Steps of a call.
_CALL: Final = 3
#: Classes of values whose method calls are bounded.
_VALUES: Final = (str, list, tuple, dict, int, float)


@pass_context
def _finalize(context: Context, value: Any) -> str:
    """The text that `{{ value }}` writes."""
    budget: RenderBudget = context.parent[RenderBudget.NAME]
    text = value if type(value) is str else written(budget, value)
    budget.write(len(text))
    return text


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. Holds no state of a rendering; safe from any thread."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_finalize,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        del self.globals["lipsum"]
        self.filters = bounded_filters(self) | dict(COUNTERS)
        self.tests.update(bounded_tests(self))
        self.globals.update(TEMPLATE_GLOBALS)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        CountingNodes().visit(template)
        template.set_environment(self)
        return template

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # jinja2 would hand out an undefined value here, which prints as nothing.
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        plain = self.binop_table[operator]
        if operator == "+" and type(left) is int and type(right) is int:
            return left + right
        return operate(context.parent[RenderBudget.NAME], operator, left, right, plain)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # `map('name')` names a filter by a string, which could be one of the counters.
        if name in COUNTERS:
            raise SecurityError(f"no filter named {name!r}")
        return super().call_filter(name, *args, **kwargs)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = RenderBudget.of(context)
        budget.step(_CALL + (len(args) + len(kwargs) >> 4))
        owner = getattr(obj, "__self__", None)
        if owner is None:
            # The sandbox wraps `str.format` in a function.
            owner = getattr(getattr(obj, "__wrapped__", None), "__self__", None)
        if isinstance(owner, _VALUES):
            # Without the arguments that jinja2 adds for functions that take a context.
            kwargs = {name: it for name, it in kwargs.items() if name not in _ADDED}
            return call_method(budget, obj, owner, args, kwargs)
        for value in args:
            if isinstance(value, list | tuple | dict | range):
                budget.step(len(value) >> 4)
        if isinstance(owner, LoopContext):
            # `loop.changed` compares its arguments with the last ones.
            budget.walk(*args)
        result = super().call(context, obj, *args, **kwargs)
        if type(result) is dict:
            budget.walk(result)
        # A message written by a macro alone remains the caller's: it is stripped beside marks, too.
        made = (*args, *kwargs.values()) if isinstance(obj, Macro) else ()
        return next((it for it in made if isinstance(it, CallerText) and str(it) == result), result)


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training. Here it is its body, in a
    scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - the base class says so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """`dict(...)` without the methods of the class, which could change their arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)`, whose names may not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No parameter may be named `self`, since a template may use that name.
        values = dict(*args[1:], **kwargs)
        for name in values:
            _plain_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _plain_name(name)
        super().__setitem__(name, value)


def _plain_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no {name!r}: names begin without an underscore")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str.__str__(message) if isinstance(message, str) else str(message))


@pass_context
def _strftime_now(context: Context, layout: str) -> str:
    text = datetime.now().strftime(layout)
    return RenderBudget.of(context).as_caller_text(text) if isinstance(layout, CallerText) else text


TEMPLATE_GLOBALS: dict[str, Callable[..., Any]] = {
    "dict": _Dict(),
    "namespace": _Namespace,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
