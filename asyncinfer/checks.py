"""Checks of values that come from outside. Each returns the value as it is to be kept, or raises
`InvalidRequest`. Lengths are looked at before anything is copied."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import chain, islice
from numbers import Integral, Real
from typing import Any, Final

from asyncinfer.bounds import (
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_SAMPLER_ARGS,
    MAX_SAMPLER_BITS,
    MAX_SAMPLER_CHARS,
    MAX_SAMPLER_DEPTH,
    MAX_SAMPLER_NAME,
    MAX_SAMPLER_VALUES,
    MAX_SAMPLERS,
    MAX_TOKEN_LIST,
    MAX_TOKENS,
)
from asyncinfer.errors import InvalidConfig, InvalidRequest, Size

__all__ = [
    "Frozen",
    "check_arguments",
    "check_bias",
    "check_boolean",
    "check_choice",
    "check_integer",
    "check_messages",
    "check_real",
    "check_sampler",
    "check_seconds",
    "check_string",
    "check_strings",
    "check_text_messages",
    "check_token_ids",
    "checking_config",
]


class Frozen(dict[Any, Any]):
    """A mapping that is read-only, hashable and picklable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __setitem__(self, *_: object) -> None:
        raise TypeError("sampling parameters are frozen")

    __delitem__ = __setitem__
    __ior__ = clear = pop = popitem = setdefault = update = __setitem__  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[Frozen], tuple[dict[Any, Any]]]:
        return Frozen, (dict(self),)


@contextmanager
def checking_config() -> Iterator[None]:
    """Checks within are of a configuration: they raise `InvalidConfig`."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidConfig(error.field, error.value, error.bound) from None


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int, or `InvalidRequest` unless it is an integer in `[low, high]`."""
    # bool is an int in Python, and `max_tokens=True` is a mistake, not a 1. To ask for the type
    # alone takes a tenth of the time, and there are ten such options for each request.
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise InvalidRequest(name, value, "must be an integer")
    number = int(value)
    if high is None:
        if number < low:
            raise InvalidRequest(name, value, f"must be >= {low}")
        if number > sys.maxsize:
            # What counts natively, such as `islice`, takes no larger one.
            raise InvalidRequest(name, value, f"must be <= {sys.maxsize}")
    elif not low <= number <= high:
        raise InvalidRequest(name, value, f"must be between {low} and {high}")
    return number


def check_real(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> float:
    """`value` as a float, or `InvalidRequest` unless it is a finite number in `[low, high]` (with
    `open_low` in `(low, high]`)."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise InvalidRequest(name, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        # The integer is larger than any float.
        number = math.inf
    # Checked before the bounds, since every comparison with NaN is false.
    if not math.isfinite(number):
        raise InvalidRequest(name, value, "must be finite")
    if number < low or number > high or (open_low and number == low):
        if math.isinf(high):
            raise InvalidRequest(name, value, f"must be {'>' if open_low else '>='} {low:g}")
        bracket = "(" if open_low else "["
        raise InvalidRequest(name, value, f"must be in {bracket}{low:g}, {high:g}]")
    return number


def check_seconds(name: str, value: object, *, open_low: bool = False) -> float:
    """`value` as a float: seconds from 0 on (with `open_low` above 0), infinity among them."""
    if isinstance(value, float) and value == math.inf:
        return value
    return check_real(name, value, 0.0, math.inf, open_low=open_low)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidRequest(name, value, f"must be one of {', '.join(choices)}")


def check_boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, value, "must be True or False")
    return value


def check_string(name: str, value: object, most: int | None = None, least: int = 0) -> str:
    """`value`, or `InvalidRequest` unless it is a string (of `least` to `most` characters)."""
    if isinstance(value, str) and (most is None or least <= len(value) <= most):
        return value
    count = f"{least} to {most}" if least else f"<= {most}"
    of = "" if most is None else f" of {count} characters"
    raise InvalidRequest(name, value, f"must be a string{of}")


def check_strings(name: str, value: str | Iterable[str], most: int, chars: int) -> tuple[str, ...]:
    """A string or a list of them as a tuple of at most `most`, each of 1 to `chars` characters."""
    if isinstance(value, str):
        return (_check_text(name, value, chars),)
    items = _listed(name, value, most)
    return tuple(_check_text(f"{name}[{at}]", item, chars) for at, item in enumerate(items))


def check_messages(name: str, messages: Sequence[object]) -> None:
    """Refuse more than `MAX_MESSAGES` chat messages, or parts of their contents, before any of them
    is read."""
    _check_count(name, messages, MAX_MESSAGES)
    contents = (each.get("content") for each in messages if isinstance(each, Mapping))
    parts = sum(len(each) for each in contents if isinstance(each, list | tuple))
    if parts > MAX_MESSAGES:
        raise InvalidRequest(name, Size(f"{parts} parts of messages"), f"at most {MAX_MESSAGES}")


def check_text_messages(name: str, value: Sequence[object]) -> tuple[Mapping[str, str], ...]:
    """Chat messages of texts alone, so that they stay frozen and hashable."""
    check_messages(name, value)
    kept = []
    for at, each in enumerate(value):
        texts = dict(each) if isinstance(each, Mapping) else {}
        if texts.keys() != {"role", "content"} or not all(
            isinstance(text, str) for text in texts.values()
        ):
            raise InvalidRequest(f"{name}[{at}]", each, "must have role and content, both strings")
        kept.append(Frozen(texts))
    return tuple(kept)


def check_token_ids(name: str, value: Iterable[int]) -> tuple[int, ...]:
    """A list of at most `MAX_TOKEN_LIST` token ids as a tuple. Ids that the model does not have are
    found later, by `SamplingParams.check_vocabulary`."""
    items = _listed(name, value, MAX_TOKEN_LIST)
    if set(map(type, items)) == {int} and min(items) >= 0 and max(items) <= MAX_TOKENS:
        # The common case, which this finds in a tenth of the time.
        return items
    return tuple(check_integer(name, item, 0, MAX_TOKENS) for item in items)


def check_bias(name: str, value: Mapping[int, float]) -> dict[int, float]:
    """A mapping of at most `MAX_LOGIT_BIAS` token ids to biases, as a dict of its own."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, value, "must map token ids to biases")
    _check_count(name, value, MAX_LOGIT_BIAS)
    return {
        check_integer(name, token, 0, MAX_TOKENS): check_real(name, bias, -1e4, 1e4)
        for token, bias in islice(value.items(), MAX_LOGIT_BIAS + 1)
    }


def check_arguments(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a plugin, as a new dict of the same values.

    The plugin checks what the values mean. Their number, nesting and size are bounded here, so that
    copying and comparing them is bounded too.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, value, "must be a mapping")
    _check_count(name, value, MAX_SAMPLER_ARGS)
    arguments = dict(islice(value.items(), MAX_SAMPLER_ARGS + 1))
    values = chars = 0
    waiting: list[tuple[Any, int]] = [(arguments, 0)]
    while waiting:
        item, depth = waiting.pop()
        if type(item) is int and -_LARGEST < item < _LARGEST:
            continue
        if isinstance(item, str | bytes | bytearray):
            chars += len(item)
            if chars > MAX_SAMPLER_CHARS:
                bound = f"at most {MAX_SAMPLER_CHARS}"
                raise InvalidRequest(name, Size(f"{chars} characters or more"), bound)
        elif isinstance(item, Mapping | Sequence | Set):
            if depth > MAX_SAMPLER_DEPTH:
                raise InvalidRequest(name, value, f"at most {MAX_SAMPLER_DEPTH} levels of nesting")
            values += len(item)
            if values > MAX_SAMPLER_VALUES:
                bound = f"at most {MAX_SAMPLER_VALUES}"
                raise InvalidRequest(name, Size(f"{values} values or more"), bound)
            parts = chain(item, item.values()) if isinstance(item, Mapping) else item
            # Skipping small values takes a fifth of the time for most arguments.
            waiting += [(part, depth + 1) for part in parts if type(part) not in _SMALL]
        elif isinstance(item, int) and item.bit_length() > MAX_SAMPLER_BITS:
            raise InvalidRequest(name, item, f"integers of at most {MAX_SAMPLER_BITS} bits")
    return arguments


def check_sampler(value: object) -> object:
    """The `sampler` option with tuples in place of lists, and its arguments frozen."""
    if not isinstance(value, list | tuple):
        return _named(value)
    if not value:
        raise InvalidRequest("sampler", value, "must name at least one sampler")
    if len(value) > MAX_SAMPLERS:
        raise InvalidRequest("sampler", Size(f"{len(value)} entries"), f"at most {MAX_SAMPLERS}")
    return tuple(_frozen(entry) if isinstance(entry, Mapping) else _pair(entry) for entry in value)


def _check_text(name: str, value: object, chars: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(name, value, "must be a string that is not empty")
    if len(value) > chars:
        raise InvalidRequest(name, value, f"must have at most {chars} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(name, value, "a lone surrogate is no text") from None
    return value


#: Types whose values are all small; an `int` may have a million digits.
_SMALL: Final = frozenset((bool, float, complex, type(None)))
_LARGEST: Final = 1 << MAX_SAMPLER_BITS


def _listed(name: str, value: Any, most: int) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | Set):
        raise InvalidRequest(name, value, "must be a list")
    _check_count(name, value, most)
    # Counted again, since a class may give a wrong `len`.
    items = tuple(islice(value, most + 1))
    if len(items) > most:
        raise InvalidRequest(name, Size(f"{len(items)} entries"), f"at most {most}")
    return items


def _check_count(name: str, value: Sequence[Any] | Set[Any] | Mapping[Any, Any], most: int) -> None:
    try:
        count: int | str = len(value)
    except OverflowError:
        # `len` raises for lengths such as that of range(2**64).
        count = "2**63 or more"
    if isinstance(count, str) or count > most:
        raise InvalidRequest(name, Size(f"{count} entries"), f"at most {most}")


def _pair(entry: object) -> object:
    match entry:
        case (name, Mapping() as args) if isinstance(entry, list | tuple):
            return _named(name), _frozen(args)
    return _named(entry)


def _frozen(arguments: Mapping[str, Any]) -> Frozen:
    return Frozen(check_arguments("sampler", arguments))


def _named(value: object) -> object:
    if isinstance(value, str) and len(value) > MAX_SAMPLER_NAME:
        raise InvalidRequest("sampler", value, f"at most {MAX_SAMPLER_NAME} characters")
    return value
