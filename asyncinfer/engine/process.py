"""Which process this is. Asked for at every wait, and a system call takes longer than the rest of
one: so it is asked for once per process."""

from __future__ import annotations

import os

__all__ = ["current_process"]

_pid = os.getpid()


def current_process() -> int:
    """`os.getpid()`, also after a fork."""
    return _pid


def _forked() -> None:
    global _pid
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
