"""Programs that keep cores busy, for measuring an engine beside them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

__all__ = ["busy_programs"]

#: Computes until it is ended, or the program that began it has ended.
_BUSY: Final = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """As many programs as `count`, each a loop in Python that wants a core for itself."""
    with ExitStack() as stack:
        for _ in range(count):
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            stack.callback(program.kill)
        yield
