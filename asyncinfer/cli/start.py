"""The start of the program, and Ctrl-C until a command's modules are imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

__all__ = ["main", "raise_again"]

#: Whether Ctrl-C ends the process at once.
_dying: Final = threading.Event()


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit: 0 done, 1 an error, 2 wrong usage, 130 interrupted. Without
    `args` it is that of this process, which Ctrl-C ends until a command calls `raise_again`."""
    if args is None:
        _end_at_once()
    from asyncinfer.cli.app import INTERRUPTED, run

    try:
        run(args)
    except SystemExit as end:
        if args is None and end.code == INTERRUPTED:
            _leave()
        raise


def raise_again() -> None:
    """Have Ctrl-C raise `KeyboardInterrupt`, so that what is open is closed. A command calls it
    once its modules are imported, and before it opens anything."""
    if _dying.is_set():
        _dying.clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave() -> None:
    """Have a further Ctrl-C end the process at once. Python waits for the threads of pools first:
    the hub's client ends a download with its next part, or after a minute of silence."""
    from click import echo

    _end_at_once()
    # Ours have other names. Daemons or not, they are waited for.
    if any(one.name.startswith("ThreadPoolExecutor") for one in threading.enumerate()):
        # Where stderr is closed there is nobody to tell.
        with suppress(OSError, ValueError):
            echo("Ending what has begun; Ctrl-C once more ends at once", err=True)


def _end_at_once() -> None:
    """Have Ctrl-C end the process, as the system does. An exception in the middle of an import is
    lost, or leaves half of a library: numpy and torch import much from native code."""
    if (
        threading.current_thread() is threading.main_thread()
        # A shell has what it runs in the background ignore Ctrl-C.
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _dying.set()
