"""How the tests that fuzz are run.

Under `@fuzz(200)` hypothesis draws the same 200 examples in every run. `ASYNCINFER_FUZZ=50 pytest
-k fuzz` draws fifty times as many, others each time, and prints what replays one that fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

from hypothesis import HealthCheck, settings

__all__ = ["FACTOR", "fuzz"]

#: How many times the usual examples: 1 unless the environment says more.
FACTOR: Final = int(os.environ.get("ASYNCINFER_FUZZ", "1"))

_Test = TypeVar("_Test", bound=Callable[..., Any])


def fuzz(examples: int) -> Callable[[_Test], _Test]:
    return settings(
        max_examples=examples * FACTOR,
        derandomize=FACTOR == 1,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
