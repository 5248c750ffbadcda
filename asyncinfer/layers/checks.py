"""Checks of a frozen dataclass's fields, for its constructor. Each raises a `ValueError` that names
the class, the field, its value and the bounds."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from asyncinfer.errors import short_repr

__all__ = [
    "check_choice",
    "check_flags",
    "check_integers",
    "check_number",
    "refuse",
]


def refuse(owner: object, field: str, why: str) -> ValueError:
    """The error to raise about a field."""
    shown = short_repr(getattr(owner, field))
    return ValueError(f"{type(owner).__name__}.{field}={shown}: {why}")


def check_choice(owner: object, field: str, choices: Sequence[str | None]) -> None:
    """Check that the field is one of `choices`."""
    value = getattr(owner, field)
    if (value is not None and not isinstance(value, str)) or value not in choices:
        raise refuse(owner, field, f"must be one of {', '.join(map(repr, choices))}")


def check_flags(owner: object, *fields: str) -> None:
    """Check that each field is True or False."""
    for field in fields:
        if not isinstance(getattr(owner, field), bool):
            raise refuse(owner, field, "must be True or False")


def check_integers(owner: object, *fields: str, low: int, high: int) -> None:
    """Check that each field is an integer from `low` to `high`."""
    for field in fields:
        value = getattr(owner, field)
        if type(value) is not int or not low <= value <= high:
            raise refuse(owner, field, f"must be an integer from {low} to {high}")


def check_number(owner: object, field: str, *, high: float = math.inf) -> None:
    """Check that the field is a finite number above 0 and at most `high`."""
    value = getattr(owner, field)
    # The comparison also refuses an integer of too many digits, where a conversion would raise.
    if type(value) not in (int, float) or not 0 < value <= min(high, sys.float_info.max):
        bound = "" if math.isinf(high) else f" and at most {high:g}"
        raise refuse(owner, field, f"must be a number above 0{bound}, and finite")
