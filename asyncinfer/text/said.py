"""`Said`: a text of the caller's, in a template.

To everything that looks at it, it is the text itself. Where it is put together with what the
template writes, and where it is written, the marks of a `Shield` go in. What is made of it alone
(stripped, split, cut, in other letters) is the caller's still.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ClassVar, Final

from asyncinfer.text.shield import MARK, Shield

__all__ = ["Said", "clean", "holds_token", "marked", "said_by", "unescape_marks"]

#: As Python and JSON spell the mark; a backslash that was there before is doubled.
_SPELLED: Final = re.compile(rf"(?<!\\)((?:\\\\)*)\\u{ord(MARK):04x}")


class Said(str):
    """A text and its shield, which is its class's: what is made of one has the same."""

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


def said_by(shield: Shield) -> type[Said]:
    """The class of texts that this shield covers."""
    return type("Said", (Said,), {"__slots__": (), "_shield": shield})


def marked(value: Any) -> Any:
    """`value` to be put together with others."""
    return value if type(value) is str or not isinstance(value, Said) else str(value)


def holds_token(text: str) -> bool:
    """Whether a whole special token is in `text`, which is `Said`."""
    return MARK in str(text)[1:-1]


def clean(text: str) -> str:
    """`text` without its marks."""
    return text.replace(MARK, "")


def unescape_marks(text: str) -> str:
    """`text`, which was written by `repr` or as JSON, with its marks as they are elsewhere."""
    return _SPELLED.sub(rf"\1{MARK}", text) if "\\u" in text else text


def _alike(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def made_of_it(self: Said, *args: Any, **kwargs: Any) -> Any:
        kind = type(self)
        made = method(self, *args, **kwargs)
        if isinstance(made, str):
            return kind(made)
        return [kind(part) for part in made] if isinstance(made, list) else tuple(map(kind, made))

    return made_of_it


for _name in (
    *("__getitem__", "__mul__", "__rmul__", "capitalize", "casefold", "center", "expandtabs"),
    *("format", "format_map", "join", "ljust", "lower", "lstrip", "partition", "removeprefix"),
    *("removesuffix", "replace", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
    *("strip", "swapcase", "title", "translate", "upper", "zfill"),
):
    setattr(Said, _name, _alike(getattr(str, _name)))
