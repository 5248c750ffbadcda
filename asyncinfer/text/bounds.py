"""What keeps a chat template from running or growing without end.

A template is a program without `while`: it takes long by loops within loops and by macros that call
each other, and grows by operators, filters and methods that make long texts of short ones. Rounds
are counted, and sizes are known before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from jinja2 import nodes, pass_context
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

__all__ = ["Allowance", "CountingNodes", "bounded_filters", "check_binop", "check_call", "finalize"]

#: Loop rounds and macro calls of one rendering.
MAX_STEPS: Final = 300_000
#: Characters of one text or bits of one number, and of all that one rendering makes.
MAX_SIZE: Final = 64_000_000
MAX_SIZES: Final = 1_000_000_000
#: What repeating and padding may make of one value: no template has a use for more.
MAX_REPEATED: Final = 1_000_000
MAX_INDENT: Final = 100

_Body = TypeVar("_Body", nodes.For, nodes.Macro, nodes.CallBlock)


class Allowance:
    """What one rendering may still do. A variable of the template, under a name that no template
    can write. Everything raises `SecurityError` where it is too much."""

    NAME: Final = "its allowance"

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._sizes = MAX_SIZES

    @classmethod
    def of(cls, context: Context) -> Allowance:
        allowance: Allowance = context.parent[cls.NAME]
        return allowance

    def step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps < 0:
            raise SecurityError(f"more than {MAX_STEPS} loop rounds and macro calls")

    def show(self, *values: Any) -> None:
        """The values are about to be written as text, lists within lists and all."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                # A text within a list is written with its quotes and backslashes doubled.
                self.make("writing a value", 2 * len(value))
            elif isinstance(value, list | tuple | Mapping):
                self.step(len(value))
                waiting += [*value, *value.values()] if isinstance(value, Mapping) else value

    def make(self, what: str, size: int, most: int = MAX_SIZE) -> None:
        self._sizes -= max(size, 0)
        if size > most:
            raise SecurityError(f"the result of {what} is too large: {size} > {most}")
        if self._sizes < 0:
            raise SecurityError(f"more than {MAX_SIZES} characters made in all")


@pass_context
def _step(context: Context, _: None) -> None:
    Allowance.of(context).step()


class CountingNodes(NodeTransformer):
    """Makes every loop and macro count its rounds, and `~` an operation that is checked."""

    #: To be a filter of the environment: a template cannot put another in its place.
    FILTERS: Final[Mapping[str, Callable[..., Any]]] = {"take a step": _step}

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's way
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)

    def _counted(self, node: _Body) -> _Body:
        self.generic_visit(node)
        step = nodes.Filter(nodes.Const(None), "take a step", [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node


def check_binop(context: Context, operator: str, left: Any, right: Any) -> None:
    """`left operator right` is about to be computed."""
    make, what = Allowance.of(context).make, repr(operator)
    match operator, left, right:
        case "*", int(), int():
            make(what, left.bit_length() + right.bit_length(), MAX_REPEATED)
        case "*", (str() | list() | tuple()), int():
            make(what, len(left) * right, MAX_REPEATED)
        case "*", int(), (str() | list() | tuple()):
            make(what, left * len(right), MAX_REPEATED)
        case "**", int(), int():
            make(what, left.bit_length() * right, MAX_REPEATED)
        case "+", (str() | list() | tuple()), (str() | list() | tuple()):
            make(what, len(left) + len(right))
        case "%", str(), _:
            make(what, _printed(left), MAX_REPEATED)
            Allowance.of(context).show(right)


def check_call(
    context: Context, function: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """`function(*arguments, **named)` is about to be called; methods of texts are looked at."""
    # The sandbox has a function of its own around `str.format`.
    function = getattr(function, "__wrapped__", function)
    text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(text, str):
        return
    make = Allowance.of(context).make
    match name, arguments:
        case (("center" | "ljust" | "rjust" | "zfill"), (int() as width, *_)):
            make(name, width, MAX_REPEATED)
        case "expandtabs", _:
            width = arguments[0] if arguments and isinstance(arguments[0], int) else 8
            make(name, len(text) + text.count("\t") * width)
        case "join", (list() | tuple() as items,):
            make(name, _joined(items, text))
        case "replace", (str() as old, str() as new, *_):
            make(name, _replaced(text, old, new))
        case (("format" | "format_map"), _):
            make(name, _printed(text), MAX_REPEATED)
            Allowance.of(context).show(*arguments, *named.values())
        case (("join" | "replace" | "translate"), _):
            raise SecurityError(f"{name} with such arguments is not for templates")


def bounded_filters(environment: Environment) -> dict[str, Callable[..., Any]]:
    """jinja2's filters that can make much of little, checked before they run."""
    plain = dict(environment.filters)

    @pass_context
    def center(context: Context, value: Any, width: int = 80) -> Any:
        Allowance.of(context).make("center", width, MAX_REPEATED)
        return plain["center"](str(value), width)

    @pass_context
    def indent(
        context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> Any:
        text, one = str(s), width if isinstance(width, int) else len(width)
        Allowance.of(context).make("indent", len(text) + one * (text.count("\n") + 1))
        return plain["indent"](text, width, first, blank)

    @pass_context
    def replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(s), str(old), str(new)
        Allowance.of(context).make("replace", _replaced(text, old, new))
        return text.replace(old, new, -1 if count is None else count)

    @pass_context
    def join(
        context: Context, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
    ) -> str:
        if attribute is not None:
            value = map(make_attrgetter(environment, attribute), value)
        items = list(value)
        Allowance.of(context).show(*(item for item in items if not isinstance(item, str)))
        texts = [str(item) for item in items]
        Allowance.of(context).make("join", _joined(texts, str(d)))
        return str(d).join(texts)

    @pass_context
    def printf(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        Allowance.of(context).make("format", _printed(str(value)), MAX_REPEATED)
        Allowance.of(context).show(*args, *kwargs.values())
        return plain["format"](str(value), *args, **kwargs)

    def counted(name: str) -> Callable[..., Any]:
        @pass_context
        def parts(context: Context, value: Any, count: int, fill_with: Any = None) -> Any:
            Allowance.of(context).make(name, count, MAX_REPEATED)
            return plain[name](value, count, fill_with)

        return parts

    @pass_context
    def tojson(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        indent = kwargs.get("indent", args[1] if len(args) > 1 else None) or 0
        width = indent if isinstance(indent, int) else len(indent)
        Allowance.of(context).make("tojson", width, MAX_INDENT)
        Allowance.of(context).show(value)
        return plain["tojson"](value, *args, **kwargs)

    def shown(name: str) -> Callable[..., Any]:
        @pass_context
        def show(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            Allowance.of(context).show(value)
            return plain[name](value, *args, **kwargs)

        return show

    return {
        **{name: shown(name) for name in ("escape", "e", "forceescape", "string")},
        **{name: counted(name) for name in ("batch", "slice")},
        "tojson": tojson,
        "center": center,
        "indent": indent,
        "replace": replace,
        "join": join,
        "format": printf,
    }


@pass_context
def finalize(context: Context, value: Any) -> Any:
    """What `{{ value }}` writes."""
    if not isinstance(value, str):
        Allowance.of(context).show(value)
    return value


def _joined(items: list[Any] | tuple[Any, ...], separator: str) -> int:
    return sum(len(item) for item in items if isinstance(item, str)) + len(separator) * len(items)


def _replaced(text: str, old: str, new: str) -> int:
    return len(text) + max(0, len(new) - len(old)) * text.count(old)


def _printed(layout: str) -> int:
    """A width in a format allocates that many characters: as many as its digits say."""
    digits = "".join(char if char.isdigit() else " " for char in layout).split()
    return sum(int(run[:18]) for run in digits)
