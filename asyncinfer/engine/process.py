"""Which process this is, asked for once per process: every wait looks at it, and a system call
takes longer than the rest of a wait."""

from __future__ import annotations

import os

__all__ = ["pid"]

#: `os.getpid()`, also after a fork.
pid = os.getpid()


def _forked() -> None:
    global pid
    pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
