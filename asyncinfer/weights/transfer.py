"""`Transfer`: a call of the hub's client that can be given up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

__all__ = ["Transfer"]

T = TypeVar("T")

#: Bytes after which the client tells of progress. Of its own 10 MB a slow connection brings none
#: in a minute.
PART_BYTES: Final = 1 << 18
#: Calls that have not returned.
_running: Final[set[Transfer]] = set()
#: The client's own bytes of a part, while there are calls.
_clients: Final[list[int]] = []
_lock: Final = threading.Lock()


class _GivenUp(BaseException):
    """Nobody waits for the download any more. No `Exception`: the client does not try again."""


class Transfer:
    """Counts the parts of files that come, and ends the client's call once it is given up."""

    def __init__(self) -> None:
        self.updates = 0
        self._given_up = threading.Event()

    def run(self, call: Callable[[], T]) -> T:
        """What the client's `call` returns or raises. The client tells of small parts until no call
        is left."""
        from huggingface_hub import constants

        with _lock:
            if not _running:
                _clients[:] = [constants.DOWNLOAD_CHUNK_SIZE]
                constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, PART_BYTES)
            _running.add(self)
        try:
            return call()
        finally:
            with _lock:
                _running.discard(self)
                if not _running:
                    (constants.DOWNLOAD_CHUNK_SIZE,) = _clients

    def give_up(self) -> None:
        """End the call with the next part of a file, and what it gets from Xet's storage at once,
        unless another call gets something there, which would end too."""
        self._given_up.set()
        if _running == {self} and "hf_xet" in sys.modules:
            # It heeds no error of a progress bar. Older clients know no such end.
            with suppress(ImportError):
                from huggingface_hub.utils._xet import abort_xet_session

                abort_xet_session()  # type: ignore[no-untyped-call]

    def bar(self, *, shown: bool) -> type[Any]:
        """A class of the client's progress bar that counts its updates, and ends a call that was
        given up, as nothing else of the client's does. It is disabled unless `shown`, since it
        writes to the host's stderr."""
        import huggingface_hub.utils as hub

        base: Any = hub.tqdm  # type: ignore[attr-defined]
        options = {} if shown else {"disable": True}

        def start(bar: Any, *args: Any, **given: Any) -> None:
            base.__init__(bar, *args, **{**given, **options})

        def update(bar: Any, n: float | None = 1) -> Any:
            self._moved()
            return base.update(bar, n)

        def refresh(bar: Any, *args: Any, **given: Any) -> Any:
            # Called before a file is asked for.
            self._check()
            return base.refresh(bar, *args, **given)

        return type("Bar", (base,), {"__init__": start, "update": update, "refresh": refresh})

    def _moved(self) -> None:
        self._check()
        self.updates += 1

    def _check(self) -> None:
        # On a thread of Xet's an error would only be printed.
        alien = threading.current_thread().name.startswith("Dummy")
        if self._given_up.is_set() and not alien:
            raise _GivenUp
