"""`FiniteRange`: an option that takes a real number."""

from __future__ import annotations

from math import isfinite
from typing import Any

import click

__all__ = ["FiniteRange"]


class FiniteRange(click.FloatRange):
    """`click.FloatRange` takes `nan` for a number of any range, and `inf`."""

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Any:
        number = super().convert(value, param, context)
        if not isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, context)
        return number
