"""Device work in a child process: a kernel that crashes, hangs or breaks its CUDA context does not
harm the engine's process."""

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

__all__ = ["ChildOutput", "NoProcess", "answer", "ask_child"]

#: Signals of a user, or of a system without memory, for which no kernel is to blame.
_FROM_OUTSIDE: Final = (signal.SIGINT, signal.SIGTERM, 9)


class NoProcess(Exception):
    """No child could be started, or the child got no device. Nothing was done."""


@dataclass(frozen=True, slots=True)
class ChildOutput:
    """What a child wrote before it ended, and how it ended."""

    lines: list[str]
    #: Such as "was ended by signal 11".
    end: str
    #: Whether another child would end in the same way.
    lasting: bool


def ask_child(module: str, request: dict[str, Any], time_limit: float) -> ChildOutput:
    """Have `main` of a `module` of this package answer `request` in a child process, which is
    killed after `time_limit` seconds. Raises `NoProcess`."""
    python = _interpreter()
    # The child finds the modules of this process, and none in the current folder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = subprocess.Popen(
            [python, "-P", "-c", f"from {module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            # Compilers that the child starts are killed with it.
            start_new_session=True,
        )
    except OSError as error:
        raise NoProcess(f"{python}: {error.strerror}") from error
    late = False
    request = {**request, "time_limit": time_limit}
    with process:
        try:
            output, _ = process.communicate(json.dumps(request).encode(), time_limit)
        except subprocess.TimeoutExpired:
            late = True
            _kill(process)
            output, _ = process.communicate()
        except BaseException:
            _kill(process)
            raise
    if late:
        end = f"took longer than {time_limit:g} seconds"
    elif process.returncode < 0:
        end = f"was ended by signal {-process.returncode}"
    else:
        end = f"ended with exit status {process.returncode}"
    lines = output.decode("utf-8", "replace").splitlines()
    lasting = late or -process.returncode not in _FROM_OUTSIDE
    return ChildOutput(lines, end, lasting)


def answer(work: Callable[[dict[str, Any], torch.device, Callable[[str], None]], None]) -> None:
    """Runs in the child: `work` gets the request from standard input, its device, and a function
    that writes a line to standard output."""
    request = json.loads(sys.stdin.readline())
    # The child ends by itself, in case its parent is gone.
    faulthandler.dump_traceback_later(request["time_limit"], exit=True)
    # Compilers may print, and must not print into the answer.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(line: str) -> None:
        print(line, file=out, flush=True)

    device = torch.device(request["device"])
    try:
        torch.zeros(1, device=device, dtype=torch.float32)
    except RuntimeError as error:
        # In exclusive mode a GPU takes one process alone, which is the engine's.
        tell(json.dumps({"unavailable": str(error)[:200]}))
        return
    work(request, device, tell)


def _interpreter() -> str:
    """The Python interpreter. `sys.executable` may be a program that embeds Python or is frozen."""
    name = Path(sys.executable or "").stem.lower()
    if getattr(sys, "frozen", False) or not name.startswith(("python", "pypy")):
        raise NoProcess(f"sys.executable is {sys.executable!r}, no Python interpreter")
    return sys.executable


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and all processes that it started, if it still runs."""
    if process.poll() is not None:
        return
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
