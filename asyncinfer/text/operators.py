"""Operators and methods of a template, with bounded results. A result that is made of the caller's
text only stays the caller's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any, Final

from jinja2.exceptions import SecurityError

from asyncinfer.text.caller_text import CallerText, holds_token, marked, unescape_marks
from asyncinfer.text.counting import written
from asyncinfer.text.render_budget import MAX_REPEATED, RenderBudget

__all__ = ["call_method", "check_layout", "joined", "operate", "replaced"]

#: Bits of a number: templates only count messages.
_MAX_BITS: Final = 1 << 16
#: Methods that make bytes or tables, whose size is not bounded here.
_REFUSED: Final = frozenset({"encode", "maketrans", "translate", "to_bytes", "from_bytes"})
#: Methods that do not read all of a text.
_QUICK: Final = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip"})
#: Methods that handle one character at a time.
_LETTERS: Final = frozenset({"capitalize", "casefold", "lower", "swapcase", "title", "upper"})
#: A layout such as `%9.*f`, whose width or precision may be a value.
_PERCENT: Final = re.compile(r"%%|%(?:\([^)]*\))?[-#0 +]*(?:\d*\.)?(\*)")


def operate(
    budget: RenderBudget, operator: str, left: Any, right: Any, plain: Callable[[Any, Any], Any]
) -> Any:
    """`left operator right`, which `plain` computes."""
    check = budget.check
    if operator == "+" and isinstance(left, str) and isinstance(right, str):
        check("'+'", len(left) + len(right))
        return budget.keep(plain(marked(left), marked(right)))
    match operator, left, right:
        case ("+", (list() | tuple()), (list() | tuple())):
            return budget.keep(plain(left, right))
        case "*", int(), int():
            check("'*'", left.bit_length() + right.bit_length(), _MAX_BITS)
        case "**", int(), int():
            check("'**'", left.bit_length() * right, _MAX_BITS)
        case ("*", (str() | list() | tuple()), int()):
            check("'*'", len(left) * right, MAX_REPEATED)
            return budget.keep(plain(marked(left), right))
        case ("*", int(), (str() | list() | tuple())):
            check("'*'", left * len(right), MAX_REPEATED)
            return budget.keep(plain(left, marked(right)))
        case "%", str(), _:
            check_layout(budget, "'%'", left, (right,))
            values = tuple(map(marked, right)) if isinstance(right, tuple) else marked(right)
            return budget.keep(unescape_marks(str(left) % values))
    return plain(left, right)


def call_method(
    budget: RenderBudget,
    method: Callable[..., Any],
    owner: Any,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
) -> Any:
    """`method(*arguments, **named)`, a method of the value `owner`."""
    name = getattr(method, "__name__", "")
    if name in _REFUSED:
        raise SecurityError(f"{name} is not for templates")
    if not isinstance(owner, str):
        if name in ("copy", "count", "index"):
            budget.compare(owner)
        return method(*arguments, **named)
    if name in _QUICK:
        result = method(*arguments, **named)
        # Charged: what the method stripped, or its arguments, which it read.
        looked = len(owner) - len(result) if isinstance(result, str) else _length(arguments)
        budget.step(looked >> 10)
        return budget.keep(result)
    budget.step(len(owner) >> (7 if name in _LETTERS else 10))
    match name, arguments:
        case (("center" | "ljust" | "rjust" | "zfill"), (int(width), *_)):
            budget.check(name, width, MAX_REPEATED)
        case "expandtabs", _:
            width = next(iter((*arguments, *named.values())), 8)
            width = width if isinstance(width, int) else 0
            budget.check(name, len(owner) + owner.count("\t") * width)
        case "join", (items,):
            return joined(budget, owner, items)
        case "replace", (str(old), str(new), *rest):
            count = rest[0] if rest else named.get("count", -1)
            return replaced(budget, owner, old, new, count)
        case (("format" | "format_map"), _):
            check_layout(budget, name, owner, (*arguments, *named.values()))
            return budget.keep(unescape_marks(method(*arguments, **named)))
        case (("join" | "replace"), _):
            raise TypeError(f"{name} with such arguments")
    if isinstance(owner, CallerText):
        return budget.keep(method(*arguments, **named))
    result = method(*map(marked, arguments), **named)
    if name in _LETTERS:
        result = budget.guarded(owner, result)
    return budget.keep(result)


def _length(arguments: tuple[Any, ...]) -> int:
    return sum(len(it) for it in arguments if isinstance(it, str | tuple))


def joined(budget: RenderBudget, separator: str, items: Iterable[Any]) -> str:
    """The items as texts, with the separator between them."""
    texts = [written(budget, item) for item in budget.rounds(items)]
    between = str(separator)
    budget.check("join", sum(map(len, texts)) + len(between) * len(texts))
    return budget.keep(between.join(texts))


def replaced(budget: RenderBudget, text: str, old: str, new: str, count: int = -1) -> str:
    budget.step(len(text) >> 10)
    budget.check("replace", len(text) + max(0, len(new) - len(old)) * text.count(old))
    if not isinstance(text, CallerText):
        new = str(new)
        before = text + new * text.count(old) if budget.guarded("", new) != new else text
        return budget.keep(budget.guarded(before, text.replace(old, new, count)))
    if not isinstance(new, CallerText) and holds_token(budget.as_caller_text(new)):
        # The template inserts a special token of its own, which must stay one.
        text = str(text)
    return budget.keep(text.replace(old, new, count))


def check_layout(budget: RenderBudget, what: str, layout: str, values: Iterable[Any]) -> None:
    """Charge for writing `values` into a layout such as `%9d` or `{:>9}`, in which any number may
    be a width."""
    digits = "".join(char if char.isdigit() else " " for char in layout).split()
    budget.check(what, sum(int(run[:18]) for run in digits), MAX_REPEATED)
    fields = () if what == "'%'" else Formatter().parse(layout)
    if any(spec and "{" in spec for _, _, spec, _ in fields) or (
        what == "'%'" and any(found[1] for found in _PERCENT.finditer(layout))
    ):
        raise SecurityError(f"{what} with a width that is a value")
    budget.show(*values)
