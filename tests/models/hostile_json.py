"""What may stand in a JSON file instead of what should."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

#: Numbers at bounds and beyond, what is no number, what is too deep or too long.
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 64, 1.0, 0.5, -0.0, 1e-300, 1e300),
    *(2**20, 2**31 - 1, 2**31, 2**60, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(float("nan"), float("inf"), float("-inf")),
    *(None, True, False, "", "8", "NaN", "silu", "full_attention", "a\0b", "\ud800", "x" * 300),
    *([], [0], [1, 2], ["full_attention"], [None], [[]], [1.0] * 2000),
    *({}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": "longrope", "factor": 2.0}),
    json.loads("[" * 300 + "]" * 300),
)


@st.composite
def changed(draw: st.DrawFn, base: dict[str, Any], more: tuple[str, ...] = ()) -> dict[str, Any]:
    """`base` with a few of its values, also those inside of others, taken away or replaced by
    another, and perhaps with a key more."""
    values = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 4))):
        inside = [values, *(value for value in values.values() if isinstance(value, dict))]
        holder = draw(st.sampled_from(inside))
        keys = sorted({*holder, *more})
        key = draw(st.sampled_from(keys or ["a"]))
        if draw(st.booleans()) or key not in holder:
            # A copy: the next change may be one inside of it.
            holder[key] = copy.deepcopy(draw(st.sampled_from(VALUES) | st.integers() | st.floats()))
        elif isinstance(holder[key], list) and holder[key] and draw(st.booleans()):
            at = draw(st.integers(0, len(holder[key]) - 1))
            holder[key] = [*holder[key][:at], draw(st.sampled_from(VALUES)), *holder[key][at + 1 :]]
        else:
            del holder[key]
    return values
