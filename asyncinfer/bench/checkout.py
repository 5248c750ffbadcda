"""`from_checkout`: what measures the engine's internals is part of the tests, not of the wheel."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from asyncinfer.bench.record import BenchError

__all__ = ["from_checkout"]

#: Beside the package in a checkout; not there where a wheel was installed.
TESTS: Final = Path(__file__).resolve().parents[2] / "tests"


def from_checkout(name: str) -> ModuleType:
    """The module `benchmarks.NAME` of the checkout that this package runs from. Raises `BenchError`
    outside a checkout."""
    if not (TESTS / "benchmarks" / f"{name}.py").is_file():
        raise BenchError(
            "tests/benchmarks is missing, which an installed package does not have: "
            "run `python -m asyncinfer bench` in a checkout of the source"
        )
    if str(TESTS) not in sys.path:
        # First, since other packages may be called `benchmarks`. Processes that are spawned from
        # here get the same path.
        sys.path.insert(0, str(TESTS))
    return import_module(f"benchmarks.{name}")
