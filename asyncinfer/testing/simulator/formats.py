"""What answers of a simulated life have to fit, and which tokens may follow, worked out from all
texts that fit and without the engine's grammars."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from typing import Any, Final

from asyncinfer.testing.oracle import EOS_ID
from asyncinfer.testing.simulator.vocabulary import VOCAB, bytes_of

__all__ = ["FORMATS", "allowed", "chars", "fits", "must_follow"]

#: Options of a request, by the name that scenarios have for them.
FORMATS: Final[dict[str, dict[str, Any]]] = {
    "choice": {"choice": ["ab", "abc", "he fed", "é€"]},
    "one": {"choice": ["feed a cab"]},
    "regex": {"regex": "[ab]{2,4}(c|é)?"},
}
_FITTING: Final[dict[str, frozenset[bytes]]] = {
    "choice": frozenset(text.encode() for text in FORMATS["choice"]["choice"]),
    "one": frozenset(text.encode() for text in FORMATS["one"]["choice"]),
    "regex": frozenset(
        ("".join(letters) + end).encode()
        for count in range(2, 5)
        for letters in product("ab", repeat=count)
        for end in ("", "c", "é")
    ),
}


@cache
def allowed(name: str, text: bytes) -> tuple[int, ...]:
    """The tokens that may follow a text, in order."""
    begun = [each for each in _FITTING[name] if each.startswith(text)]
    return tuple(
        token
        for token in range(VOCAB)
        if (
            text in begun
            if token == EOS_ID
            else any(each.startswith(text + bytes_of(token)) for each in begun)
        )
    )


def must_follow(name: str, text: bytes, token: int) -> bool:
    """Whether nothing but the token's text can come next, so that the token need not be drawn."""
    begun = [each for each in _FITTING[name] if each.startswith(text)]
    longer = text + bytes_of(token)
    only = {each[: len(longer)] for each in begun} == {longer}
    return token != EOS_ID and text not in begun and only


def chars(name: str) -> int:
    """Characters of a format, as it is compiled."""
    ((kind, value),) = FORMATS[name].items()
    return len(json.dumps(value) if kind == "choice" else value)


def fits(name: str, text: bytes) -> bool:
    """Whether it is a whole answer."""
    return text in _FITTING[name]
