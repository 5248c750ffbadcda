"""jinja2's filters and tests, charged for what they read and for what they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final

from jinja2 import pass_context
from jinja2.environment import Environment
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from markupsafe import Markup, escape

from asyncinfer.text.caller_text import CallerText, clean, marked, unescape_marks
from asyncinfer.text.counting import written
from asyncinfer.text.operators import check_layout, joined, replaced
from asyncinfer.text.render_budget import MAX_REPEATED, RenderBudget

__all__ = ["bounded_filters", "bounded_tests"]

_Filter = Callable[..., Any]

#: Filters that templates do not get: their output has no bound, and no chat template needs them.
_LEFT_OUT: Final = frozenset({"pprint", "urlize", "wordwrap", "xmlattr"})
#: Filters that are not charged: they look at one value and make nothing.
_FREE: Final = frozenset({"abs", "attr", "count", "d", "default", "first", "float", "items"})
_FREE_TOO: Final = frozenset({"last", "length", "random"})
#: Steps for a thousand items or characters; filters not listed, such as sorting, cost the most.
_PRICES: Final = {
    "trim": 1,
    **dict.fromkeys(("capitalize", "lower", "upper"), 8),
    **dict.fromkeys(("list", "reverse", "safe"), 50),
    **dict.fromkeys(("striptags", "title", "truncate", "urlencode", "wordcount"), 500),
}
_DEAREST: Final = 4000
_TIMES: Final = 4
#: Digits of a number that is parsed or rounded.
_MAX_DIGITS: Final = 1000
_MAX_INDENT: Final = 100
_COMPARING: Final = (
    *("eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne"),
    *("==", "!=", ">=", ">", "<=", "<"),
)


def bounded_filters(environment: Environment) -> dict[str, _Filter]:
    """Every filter that a template may use."""
    plain = {name: it for name, it in environment.filters.items() if name not in _LEFT_OUT}
    for name in plain.keys() - _FREE - _FREE_TOO:
        plain[name] = _priced(plain[name], _PRICES.get(name, _DEAREST))
    return plain | {
        "batch": _counted("batch", plain["batch"]),
        "center": _center,
        "e": _escape,
        "escape": _escape,
        "forceescape": _escape,
        "format": _format,
        "indent": _indent,
        "int": _short("int", environment.filters["int"]),
        "join": _join,
        "replace": _replace,
        "round": _short("round", environment.filters["round"]),
        "slice": _counted("slice", plain["slice"]),
        "string": _string,
        "striptags": _striptags(plain["striptags"]),
        "sum": _sum(plain["sum"]),
        "tojson": _tojson,
    }


def bounded_tests(environment: Environment) -> dict[str, _Filter]:
    """The tests that compare all of a value."""
    return {name: _compared(environment.tests[name]) for name in _COMPARING}


def _priced(plain: _Filter, price: int) -> _Filter:
    call = _in_context(plain)

    @pass_context
    def priced(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = RenderBudget.of(context)
        if isinstance(value, Sized):
            budget.step(1 + len(value) * price // 1000)
            if price == _DEAREST and not isinstance(value, str):
                # Sorting compares each value a few times.
                budget.step(_TIMES * budget.walk(value))
        elif isinstance(value, Iterator):
            value = budget.rounds(value, 1 + price // 1000)
        result = call(context, value, *args, **kwargs)
        if isinstance(result, str) and not isinstance(result, CallerText):
            # The filter returned a plain string: make it the caller's text again.
            if isinstance(value, CallerText):
                result = budget.as_caller_text(clean(result))
            elif isinstance(value, str):
                result = budget.guarded(value, result)
        return budget.keep(result)

    return priced


def _in_context(plain: _Filter) -> _Filter:
    """`plain` as a function of the context, whatever first argument jinja2 would hand it."""
    takes = getattr(plain, "jinja_pass_arg", None)
    match getattr(takes, "name", None):
        case None:
            return lambda context, *args, **kwargs: plain(*args, **kwargs)
        case "environment":
            return lambda context, *args, **kw: plain(context.environment, *args, **kw)
        case "eval_context":
            return lambda context, *args, **kw: plain(context.eval_ctx, *args, **kw)
    return plain


def _counted(name: str, priced: _Filter) -> _Filter:
    @pass_context
    def parts(context: Context, value: Any, count: int, fill_with: Any = None) -> Any:
        budget = RenderBudget.of(context)
        budget.check(name, count, MAX_REPEATED)
        budget.step(count >> 2)
        return budget.rounds(priced(context, value, count, fill_with))

    return parts


def _short(name: str, plain: _Filter) -> _Filter:
    """A filter of numbers whose value and arguments are no longer than a number may be."""

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        for one in (value, *args, *kwargs.values()):
            size = len(one) if isinstance(one, Sized) else 0
            RenderBudget.of(context).check(name, size, _MAX_DIGITS)
        if name == "round":
            digits = next(iter((*args, *kwargs.values())), 0)
            size = abs(digits) if isinstance(digits, int) else 0
            RenderBudget.of(context).check(name, size, _MAX_DIGITS)
        return plain(value, *args, **kwargs)

    return bounded


def _striptags(priced: _Filter) -> _Filter:
    @pass_context
    def striptags(context: Context, value: Any) -> Any:
        text = value if isinstance(value, str) else written(RenderBudget.of(context), value)
        # Removing a tag copies the rest of the text.
        RenderBudget.of(context).step(text.count("<") * len(text) >> 12)
        return priced(context, text)

    return striptags


def _sum(priced: _Filter) -> _Filter:
    @pass_context
    def total(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(RenderBudget.of(context).rounds(value))
        # A sum of lists makes a new list for each item.
        length = sum(len(item) for item in items if isinstance(item, list | tuple))
        RenderBudget.of(context).step(length * len(items) >> 8)
        return priced(context, items, *args, **kwargs)

    return total


def _compared(plain: Any) -> _Filter:
    @pass_context
    def compared(context: Context, value: Any, other: Any) -> Any:
        RenderBudget.of(context).compare(other)
        return plain(value, other)

    return compared


@pass_context
def _string(context: Context, value: Any) -> str:
    return value if isinstance(value, str) else written(RenderBudget.of(context), value)


@pass_context
def _escape(context: Context, value: Any) -> Markup:
    budget = RenderBudget.of(context)
    text = written(budget, value)
    budget.step(len(text) >> 7)
    budget.check("escape", len(text) * 5)
    return budget.keep(escape(text))


@pass_context
def _center(context: Context, value: Any, width: int = 80) -> Any:
    budget = RenderBudget.of(context)
    budget.check("center", width, MAX_REPEATED)
    return budget.keep(written(budget, value).center(width))


@pass_context
def _indent(
    context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> Any:
    budget = RenderBudget.of(context)
    text = written(budget, s)
    by = " " * width if isinstance(width, int) and width <= _MAX_INDENT else width
    if not isinstance(by, str):
        budget.check("indent", int(by), _MAX_INDENT)
    budget.step(len(text) >> 6)
    budget.check("indent", len(text) + len(str(by)) * (text.count("\n") + 1))
    lines = (text + "\n").splitlines()
    mark = str(by)
    if blank:
        done = f"\n{mark}".join(lines)
    else:
        rest = [mark + line if line else line for line in lines[1:]]
        done = "\n".join([lines[0], *rest]) if lines else ""
    return budget.keep(mark + done if first else done)


@pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    budget = RenderBudget.of(context)
    text, old, new = (it if isinstance(it, str) else written(budget, it) for it in (s, old, new))
    return replaced(budget, text, old, new, -1 if count is None else count)


@pass_context
def _join(
    context: Context, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return joined(RenderBudget.of(context), written(RenderBudget.of(context), d), value)


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("can't handle positional and keyword arguments at the same time")
    budget = RenderBudget.of(context)
    layout = written(budget, value)
    check_layout(budget, "'%'", layout, (*args, *kwargs.values()))
    values = {name: marked(it) for name, it in kwargs.items()} or tuple(map(marked, args))
    return budget.keep(unescape_marks(layout % values))


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which no model expects.
    budget = RenderBudget.of(context)
    width = len(indent) if isinstance(indent, str) else indent or 0
    budget.check("tojson", width + sum(map(len, separators or ())), _MAX_INDENT)
    budget.show(value)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    budget.step(len(text) >> 7)
    # Values come from the caller, so the whole JSON text is the caller's.
    return budget.keep(budget.as_caller_text(clean(unescape_marks(text))))
