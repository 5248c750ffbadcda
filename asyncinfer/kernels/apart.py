"""Work on a device in a process of its own: kernels that end it, hang or leave their device in an
error do nothing to the engine's process."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["NoProcess", "Told", "answer", "ask_apart"]

#: Signals that come from a user, or from a system without memory, and say nothing of a kernel.
_FROM_OUTSIDE: Final = (signal.SIGINT, signal.SIGTERM, 9)


class NoProcess(Exception):
    """No process could be started, or it had no device of its own. Nothing was done."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a process wrote before it ended, and how it did."""

    lines: list[str]
    #: Such as "was ended by signal 11".
    end: str
    #: Whether the next process will end so, too.
    lasting: bool


def ask_apart(module: str, request: dict[str, Any], time_limit: float) -> Told:
    """Have `main` of a `module` of this package answer `request` in a process that ends with it,
    after `time_limit` seconds at most. Raises `NoProcess`."""
    python = _interpreter()
    # The modules of this process, from where it has them, and none of the current folder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = subprocess.Popen(
            [python, "-P", "-c", f"from {module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # Compilers that it starts end with it.
            start_new_session=True,
        )
    except OSError as error:
        raise NoProcess(f"{python}: {error.strerror}") from error
    late = False
    request = {**request, "time_limit": time_limit}
    with process:
        try:
            told, _ = process.communicate(json.dumps(request).encode(), time_limit)
        except subprocess.TimeoutExpired:
            late = True
            _kill(process)
            told, _ = process.communicate()
        except BaseException:
            _kill(process)
            raise
    if late:
        end = f"took longer than {time_limit:g} seconds"
    elif process.returncode < 0:
        end = f"was ended by signal {-process.returncode}"
    else:
        end = f"ended with exit status {process.returncode}"
    lines = told.decode("utf-8", "replace").splitlines()
    lasting = late or -process.returncode not in _FROM_OUTSIDE
    return Told(lines, end, lasting)


def answer(work: Callable[[dict[str, Any], torch.device, Callable[[str], None]], None]) -> None:
    """The other process: `work` gets the request from standard input, its device, and what writes a
    line to standard output."""
    request = json.loads(sys.stdin.readline())
    # Also where nobody is left to end it.
    faulthandler.dump_traceback_later(request["time_limit"], exit=True)
    # What compilers print is no answer.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(line: str) -> None:
        print(line, file=out, flush=True)

    device = torch.device(request["device"])
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        # A GPU may take one process alone, and the engine's has it.
        tell(json.dumps({"unavailable": str(error)[:200]}))
        return
    work(request, device, tell)


def _interpreter() -> str:
    """The program to start. An application that embeds Python or was frozen is another one."""
    name = Path(sys.executable or "").stem.lower()
    if getattr(sys, "frozen", False) or not name.startswith(("python", "pypy")):
        raise NoProcess(f"sys.executable is {sys.executable!r}, no Python interpreter")
    return sys.executable


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End it with all that it started, if it is still there."""
    if process.poll() is not None:
        return
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
