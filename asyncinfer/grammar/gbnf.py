"""GBNF, as llama.cpp writes grammars, in the part of it that the grammar library reads rightly."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["gbnf_as_lark", "is_gbnf"]

#: A rule at the beginning of a line. Lark has a single colon there.
_RULE: Final = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
_CHAR: Final = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|[^\\]"
#: What a grammar consists of; comments and bounds stay as they are.
_PARTS: Final = re.compile(
    r"(?P<kept>#[^\r\n]*|\{[^{}]*\})"
    r'|"(?P<text>(?:[^"\\]|\\.)*)"'
    r"|\[(?P<not>\^?)(?P<class>(?:[^\]\\]|\\.)*)\]"
    r"|(?P<any>\.)"
    r"|(?P<name>[\w-]+)",
    re.DOTALL,
)
_ITEM: Final = re.compile(f"(?P<low>{_CHAR})(?:-(?P<high>{_CHAR}))?", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
#: Characters of a class that the library's expressions give a meaning.
_OPERATORS: Final = frozenset("&~-^[]")


def is_gbnf(text: str) -> bool:
    return _RULE.search(text) is not None


def gbnf_as_lark(text: str) -> str:
    """The grammar in Lark's syntax. Raises any exception for invalid GBNF.

    The library takes some characters of a class for operators (`&&`), a dot for one line's, and
    names as equal that differ by case, or by `-` and `_`. All of these are written otherwise here.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    names: dict[str, str] = {"root": "root"}
    taken = {"root", "start"}

    def part(found: re.Match[str]) -> str:
        if (inner := found["text"]) is not None:
            return '"' + re.sub(_CHAR, lambda char: _written(char[0]), inner, flags=re.DOTALL) + '"'
        if (inner := found["class"]) is not None:
            return f"[{found['not']}{_ITEM.sub(_item, inner)}]"
        if found["any"]:
            return "[\\x00-\U0010ffff]"
        if name := found["name"]:
            if name not in names:
                names[name] = _free(name, taken)
            return names[name]
        return found[0]

    return gbnf_to_lark(_PARTS.sub(part, text))


def _free(name: str, taken: set[str]) -> str:
    """A name that the library takes for no other one."""
    made = first = name if name[0].isalpha() else f"r{name}"
    count = 1
    while (key := re.sub(r"([a-z])([A-Z])|-", r"\1_\2", made).lower()) in taken:
        count += 1
        made = f"{first}-{count}"
    taken.add(key)
    return made


def _item(found: re.Match[str]) -> str:
    low = _written(found["low"], _OPERATORS)
    return f"{low}-{_written(found['high'], _OPERATORS)}" if found["high"] else low


def _written(char: str, escaped: frozenset[str] = frozenset()) -> str:
    """A character as the library reads it: it drops leading zeros of a number, and then takes
    letters that follow for digits."""
    if char[0] == "\\" and char[1] in "xuU" and len(char) > 2:
        number = int(char[2:], 16)
        if number >= 0x80 and not 0xD800 <= number < 0xE000:
            return chr(number)
        return f"\\x{number:02x}" if number < 0x80 else char
    plain = _ESCAPES.get(char[1], char) if char[0] == "\\" else char
    if plain in escaped:
        return f"\\x{ord(plain):02x}"
    return plain if plain in "[]" else char
