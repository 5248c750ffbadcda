"""`CallerText`: a text from the caller in a chat template.

Code that reads it sees the text itself. Where it is joined with text of the template, and where
it is written, it gets the marks of a `Shield`. A text made of it alone (stripped, split, cut, in
another case) is a `CallerText` too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ClassVar, Final

from asyncinfer.text.shield import MARK, Shield

__all__ = ["CallerText", "caller_text_class", "clean", "holds_token", "marked", "unescape_marks"]

#: The mark as Python and JSON escape it; both double a backslash of the text itself.
_SPELLED: Final = re.compile(rf"(?<!\\)((?:\\\\)*)\\u{ord(MARK):04x}")


class CallerText(str):
    """A text from the caller. The shield is an attribute of the class, so that a text made of this
    one has the same shield."""

    __slots__ = ()

    _shield: ClassVar[Shield]

    def __str__(self) -> str:
        return self._shield.mark(str.__str__(self))

    def __repr__(self) -> str:
        return self._shield.mark(str.__repr__(self))

    def __format__(self, layout: str) -> str:
        return self._shield.mark(str.__format__(self, layout))

    def __add__(self, other: str) -> str:
        return str(self) + str(other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return str(other) + str(self) if isinstance(other, str) else NotImplemented

    def __mod__(self, values: Any) -> str:
        text: str = str(self) % values
        return text

    def __iter__(self) -> Iterator[str]:
        return map(type(self), str.__iter__(self))


def caller_text_class(shield: Shield) -> type[CallerText]:
    """The class of texts that this shield covers."""
    return type("CallerText", (CallerText,), {"__slots__": (), "_shield": shield})


def marked(value: Any) -> Any:
    """`value` with marks if it is a `CallerText`, to be joined with other text."""
    return value if type(value) is str or not isinstance(value, CallerText) else str(value)


def holds_token(text: str) -> bool:
    """Whether a whole special token is in `text`, which is `CallerText`."""
    return MARK in str(text)[1:-1]


def clean(text: str) -> str:
    """`text` without its marks."""
    return text.replace(MARK, "")


def unescape_marks(text: str) -> str:
    """`text`, which `repr` or JSON has written, with its escaped marks as plain marks again."""
    return _SPELLED.sub(rf"\1{MARK}", text) if "\\u" in text else text


def _alike(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def same_class(self: CallerText, *args: Any, **kwargs: Any) -> Any:
        kind = type(self)
        made = method(self, *args, **kwargs)
        if isinstance(made, str):
            return kind(made)
        return [kind(part) for part in made] if isinstance(made, list) else tuple(map(kind, made))

    return same_class


for _name in (
    *("__getitem__", "__mul__", "__rmul__", "capitalize", "casefold", "center", "expandtabs"),
    *("format", "format_map", "join", "ljust", "lower", "lstrip", "partition", "removeprefix"),
    *("removesuffix", "replace", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
    *("strip", "swapcase", "title", "translate", "upper", "zfill"),
):
    setattr(CallerText, _name, _alike(getattr(str, _name)))
