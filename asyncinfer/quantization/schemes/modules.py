"""`Modules`: the names and patterns of modules in a `quantization_config`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

__all__ = ["Modules"]

_MOST_LENGTH: Final = 500
#: Repetitions in one expression: each may multiply the time of a search by a name's length.
_MOST_REPEATS: Final = 4
_REPEATED_GROUP: Final = re.compile(r"\)(?:[*+]|\{)")
#: A "?" after another repetition or a "(" is none of its own.
_REPEAT: Final = re.compile(r"(?<!\\)(?:[*+]|\{\d*,\d*\}|(?<![(*+?}])\?)")
#: Ways through all alternatives of an expression together, and expressions in one list.
_MOST_WAYS: Final = 4096
_MOST_EXPRESSIONS: Final = 4096


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules that some names mean: a name is a part of a module's dotted one, such as
    `lm_head` or `layers.0.self_attn`; one with "re:" before it is a regular expression of the
    beginning, and `*` stands for anything."""

    names: frozenset[str] = frozenset()
    expressions: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """The modules of these names. Raises `ValueError`, with the name, for an expression that is
        invalid or could take long."""
        plain, expressions = set(), []
        for name in names:
            if name.startswith("re:"):
                expressions.append(_compiled(name[3:], name))
            elif "*" in name:
                parts = map(re.escape, name.split("*"))
                expressions.append(_compiled(".*".join(parts) + "$", name))
            else:
                plain.add(name.strip("."))
            if len(expressions) > _MOST_EXPRESSIONS:
                raise ValueError(f"has more than {_MOST_EXPRESSIONS} patterns")
        return cls(frozenset(plain), tuple(expressions))

    def __contains__(self, module: str) -> bool:
        parts = module.split(".")
        count = len(parts)
        if self.names and any(
            ".".join(parts[first:end]) in self.names
            for first in range(count)
            for end in range(first + 1, count + 1)
        ):
            return True
        return any(expression.match(module) for expression in self.expressions)


def _compiled(expression: str, name: str) -> re.Pattern[str]:
    """Compile an expression of a checkpoint. Nobody vouches for it, so one that could take
    exponential time is refused."""
    if len(expression) > _MOST_LENGTH:
        raise ValueError(f"{name[:40]}... has more than {_MOST_LENGTH} characters")
    if _REPEATED_GROUP.search(expression) or len(_REPEAT.findall(expression)) > _MOST_REPEATS:
        raise ValueError(f"{name!r} repeats a group, or more than {_MOST_REPEATS} times")
    groups = max(1, expression.count("("))
    if (1 + expression.count("|") / groups) ** groups > _MOST_WAYS:
        raise ValueError(f"{name!r} has more than {_MOST_WAYS} ways through its alternatives")
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{name!r} is no regular expression: {error}") from None
