"""Operators and methods of a template: their results are bounded, and stay the caller's where
they were."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any, Final

from jinja2.exceptions import SecurityError

from asyncinfer.text.allowance import MAX_REPEATED, Allowance
from asyncinfer.text.counting import written
from asyncinfer.text.said import Said, holds_token, marked, unescape_marks

__all__ = ["call_method", "check_layout", "joined", "operate", "replaced"]

#: Bits of a number: templates count messages.
_MAX_BITS: Final = 1 << 16
#: Methods that make bytes, or tables for them; bytes are not bounded.
_REFUSED: Final = frozenset({"encode", "maketrans", "translate", "to_bytes", "from_bytes"})
#: Methods of texts that do not look through all of it.
_QUICK: Final = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip"})
#: Methods that look at a character at a time.
_LETTERS: Final = frozenset({"capitalize", "casefold", "lower", "swapcase", "title", "upper"})
#: `%9.*f` and the like: the width or the precision is a value.
_PERCENT: Final = re.compile(r"%%|%(?:\([^)]*\))?[-#0 +]*(?:\d*\.)?(\*)")


def operate(
    allowance: Allowance, operator: str, left: Any, right: Any, plain: Callable[[Any, Any], Any]
) -> Any:
    """`left operator right`, which `plain` computes."""
    check = allowance.check
    if operator == "+" and isinstance(left, str) and isinstance(right, str):
        check("'+'", len(left) + len(right))
        return allowance.keep(plain(marked(left), marked(right)))
    match operator, left, right:
        case ("+", (list() | tuple()), (list() | tuple())):
            return allowance.keep(plain(left, right))
        case "*", int(), int():
            check("'*'", left.bit_length() + right.bit_length(), _MAX_BITS)
        case "**", int(), int():
            check("'**'", left.bit_length() * right, _MAX_BITS)
        case ("*", (str() | list() | tuple()), int()):
            check("'*'", len(left) * right, MAX_REPEATED)
            return allowance.keep(plain(marked(left), right))
        case ("*", int(), (str() | list() | tuple())):
            check("'*'", left * len(right), MAX_REPEATED)
            return allowance.keep(plain(left, marked(right)))
        case "%", str(), _:
            check_layout(allowance, "'%'", left, (right,))
            values = tuple(map(marked, right)) if isinstance(right, tuple) else marked(right)
            return allowance.keep(unescape_marks(str(left) % values))
    return plain(left, right)


def call_method(
    allowance: Allowance,
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
            allowance.compare(owner)
        return method(*arguments, **named)
    if name in _QUICK:
        result = method(*arguments, **named)
        # It looked at what it took off, or at what it was given.
        looked = len(owner) - len(result) if isinstance(result, str) else _length(arguments)
        allowance.step(looked >> 10)
        return allowance.keep(result)
    allowance.step(len(owner) >> (7 if name in _LETTERS else 10))
    match name, arguments:
        case (("center" | "ljust" | "rjust" | "zfill"), (int(width), *_)):
            allowance.check(name, width, MAX_REPEATED)
        case "expandtabs", _:
            width = next(iter((*arguments, *named.values())), 8)
            width = width if isinstance(width, int) else 0
            allowance.check(name, len(owner) + owner.count("\t") * width)
        case "join", (items,):
            return joined(allowance, owner, items)
        case "replace", (str(old), str(new), *rest):
            count = rest[0] if rest else named.get("count", -1)
            return replaced(allowance, owner, old, new, count)
        case (("format" | "format_map"), _):
            check_layout(allowance, name, owner, (*arguments, *named.values()))
            return allowance.keep(unescape_marks(method(*arguments, **named)))
        case (("join" | "replace"), _):
            raise TypeError(f"{name} with such arguments")
    if isinstance(owner, Said):
        return allowance.keep(method(*arguments, **named))
    result = method(*map(marked, arguments), **named)
    if name in _LETTERS:
        result = allowance.guarded(owner, result)
    return allowance.keep(result)


def _length(arguments: tuple[Any, ...]) -> int:
    return sum(len(it) for it in arguments if isinstance(it, str | tuple))


def joined(allowance: Allowance, separator: str, items: Iterable[Any]) -> str:
    """The items as texts, with the separator between them."""
    texts = [written(allowance, item) for item in allowance.rounds(items)]
    between = str(separator)
    allowance.check("join", sum(map(len, texts)) + len(between) * len(texts))
    return allowance.keep(between.join(texts))


def replaced(allowance: Allowance, text: str, old: str, new: str, count: int = -1) -> str:
    allowance.step(len(text) >> 10)
    allowance.check("replace", len(text) + max(0, len(new) - len(old)) * text.count(old))
    if not isinstance(text, Said):
        new = str(new)
        before = text + new * text.count(old) if allowance.guarded("", new) != new else text
        return allowance.keep(allowance.guarded(before, text.replace(old, new, count)))
    if not isinstance(new, Said) and holds_token(allowance.said(new)):
        # The template's own token, which is to be one.
        text = str(text)
    return allowance.keep(text.replace(old, new, count))


def check_layout(allowance: Allowance, what: str, layout: str, values: Iterable[Any]) -> None:
    """`values` are about to be written into a layout such as `%9d` or `{:>9}`. Each of its numbers
    may be a width, and takes as many characters."""
    digits = "".join(char if char.isdigit() else " " for char in layout).split()
    allowance.check(what, sum(int(run[:18]) for run in digits), MAX_REPEATED)
    fields = () if what == "'%'" else Formatter().parse(layout)
    if any(spec and "{" in spec for _, _, spec, _ in fields) or (
        what == "'%'" and any(its[1] for its in _PERCENT.finditer(layout))
    ):
        raise SecurityError(f"{what} with a width that is a value")
    allowance.show(*values)
