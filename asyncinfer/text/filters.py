"""jinja2's filters and tests at a price: for what they read, and for what they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final

from jinja2 import pass_context
from jinja2.environment import Environment
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from markupsafe import Markup, escape

from asyncinfer.text.allowance import MAX_REPEATED, Allowance
from asyncinfer.text.counting import written
from asyncinfer.text.operators import check_layout, joined, replaced
from asyncinfer.text.said import Said, clean, marked, unescape_marks

__all__ = ["bounded_filters", "bounded_tests"]

_Filter = Callable[..., Any]

#: They write at any length, and no chat needs them.
_LEFT_OUT: Final = frozenset({"pprint", "urlize", "wordwrap", "xmlattr"})
#: They take one look at a value, and make nothing.
_FREE: Final = frozenset({"abs", "attr", "count", "d", "default", "first", "float", "items"})
_FREE_TOO: Final = frozenset({"last", "length", "random"})
#: Steps for a thousand items or characters; sorting and the like take a few for each.
_PRICES: Final = {
    "trim": 1,
    **dict.fromkeys(("capitalize", "lower", "upper"), 8),
    **dict.fromkeys(("list", "reverse", "safe"), 50),
    **dict.fromkeys(("striptags", "title", "truncate", "urlencode", "wordcount"), 500),
}
_DEAREST: Final = 4000
_TIMES: Final = 4
#: Of a number that is read from a text, or rounded.
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
    """The tests that look at all of a value."""
    return {name: _compared(environment.tests[name]) for name in _COMPARING}


def _priced(plain: _Filter, price: int) -> _Filter:
    call = _in_context(plain)

    @pass_context
    def priced(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        allowance = Allowance.of(context)
        if isinstance(value, Sized):
            allowance.step(1 + len(value) * price // 1000)
            if price == _DEAREST and not isinstance(value, str):
                # Sorting compares each value a few times.
                allowance.step(_TIMES * allowance.walk(value))
        elif isinstance(value, Iterator):
            value = allowance.rounds(value, 1 + price // 1000)
        result = call(context, value, *args, **kwargs)
        if isinstance(result, str) and not isinstance(result, Said):
            # It went through something that only knows texts.
            if isinstance(value, Said):
                result = allowance.said(clean(result))
            elif isinstance(value, str):
                result = allowance.guarded(value, result)
        return allowance.keep(result)

    return priced


def _in_context(plain: _Filter) -> _Filter:
    """`plain` as if it took the context, whatever jinja2 hands it first."""
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
        allowance = Allowance.of(context)
        allowance.check(name, count, MAX_REPEATED)
        allowance.step(count >> 2)
        return allowance.rounds(priced(context, value, count, fill_with))

    return parts


def _short(name: str, plain: _Filter) -> _Filter:
    """For numbers: nothing is longer than numbers are, neither the value nor an argument."""

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        for one in (value, *args, *kwargs.values()):
            size = len(one) if isinstance(one, Sized) else 0
            Allowance.of(context).check(name, size, _MAX_DIGITS)
        if name == "round":
            digits = next(iter((*args, *kwargs.values())), 0)
            size = abs(digits) if isinstance(digits, int) else 0
            Allowance.of(context).check(name, size, _MAX_DIGITS)
        return plain(value, *args, **kwargs)

    return bounded


def _striptags(priced: _Filter) -> _Filter:
    @pass_context
    def striptags(context: Context, value: Any) -> Any:
        text = value if isinstance(value, str) else written(Allowance.of(context), value)
        # Each tag that is taken out copies the rest.
        Allowance.of(context).step(text.count("<") * len(text) >> 12)
        return priced(context, text)

    return striptags


def _sum(priced: _Filter) -> _Filter:
    @pass_context
    def total(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(Allowance.of(context).rounds(value))
        # Of lists, each sum on the way is a new one.
        length = sum(len(item) for item in items if isinstance(item, list | tuple))
        Allowance.of(context).step(length * len(items) >> 8)
        return priced(context, items, *args, **kwargs)

    return total


def _compared(plain: Any) -> _Filter:
    @pass_context
    def compared(context: Context, value: Any, other: Any) -> Any:
        Allowance.of(context).compare(other)
        return plain(value, other)

    return compared


@pass_context
def _string(context: Context, value: Any) -> str:
    return value if isinstance(value, str) else written(Allowance.of(context), value)


@pass_context
def _escape(context: Context, value: Any) -> Markup:
    allowance = Allowance.of(context)
    text = written(allowance, value)
    allowance.step(len(text) >> 7)
    allowance.check("escape", len(text) * 5)
    return allowance.keep(escape(text))


@pass_context
def _center(context: Context, value: Any, width: int = 80) -> Any:
    allowance = Allowance.of(context)
    allowance.check("center", width, MAX_REPEATED)
    return allowance.keep(written(allowance, value).center(width))


@pass_context
def _indent(
    context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> Any:
    allowance = Allowance.of(context)
    text = written(allowance, s)
    by = " " * width if isinstance(width, int) and width <= _MAX_INDENT else width
    if not isinstance(by, str):
        allowance.check("indent", int(by), _MAX_INDENT)
    allowance.step(len(text) >> 6)
    allowance.check("indent", len(text) + len(str(by)) * (text.count("\n") + 1))
    lines = (text + "\n").splitlines()
    mark = str(by)
    if blank:
        done = f"\n{mark}".join(lines)
    else:
        rest = [mark + line if line else line for line in lines[1:]]
        done = "\n".join([lines[0], *rest]) if lines else ""
    return allowance.keep(mark + done if first else done)


@pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    allowance = Allowance.of(context)
    text, old, new = (it if isinstance(it, str) else written(allowance, it) for it in (s, old, new))
    return replaced(allowance, text, old, new, -1 if count is None else count)


@pass_context
def _join(
    context: Context, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return joined(Allowance.of(context), written(Allowance.of(context), d), value)


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("can't handle positional and keyword arguments at the same time")
    allowance = Allowance.of(context)
    layout = written(allowance, value)
    check_layout(allowance, "'%'", layout, (*args, *kwargs.values()))
    values = {name: marked(it) for name, it in kwargs.items()} or tuple(map(marked, args))
    return allowance.keep(unescape_marks(layout % values))


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
    allowance = Allowance.of(context)
    width = len(indent) if isinstance(indent, str) else indent or 0
    allowance.check("tojson", width + sum(map(len, separators or ())), _MAX_INDENT)
    allowance.show(value)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    allowance.step(len(text) >> 7)
    # What was marked in it is the caller's, and so is the rest.
    return allowance.keep(allowance.said(clean(unescape_marks(text))))
