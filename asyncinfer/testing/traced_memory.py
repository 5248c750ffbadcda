"""`traced_memory`: how many bytes Python's objects hold, for the memory rules of the kits."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["traced_memory"]


@contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """Yields a function that counts the bytes held by objects made within the block.

    Logging is off within the block, because handlers such as pytest's keep every record.
    """
    tracing, logged = tracemalloc.is_tracing(), logging.root.manager.disable
    if not tracing:
        tracemalloc.start()
    logging.disable()
    try:
        yield _held
    finally:
        if not tracing:
            tracemalloc.stop()
        logging.disable(logged)


def _held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
