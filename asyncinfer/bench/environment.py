"""`Environment`: where a figure was measured, so that two of them can be compared or told apart."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncinfer.machine import cpu_model, usable_cores, version

__all__ = ["Environment"]


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and the versions of one run."""

    python: str
    platform: str
    cpu: str
    #: CPU cores of the machine, and those this process may use.
    cores: int
    usable_cores: int
    torch: str | None
    #: Threads torch computes with on the CPU; nothing here sets them. None where torch was not
    #: imported, which a fake model does without.
    torch_threads: int | None
    #: None where it is not installed.
    triton: str | None
    gpu: str | None
    driver: str | None
    asyncinfer: str | None
    #: Commit of the git checkout the package runs from, with "+" when files were changed; None
    #: outside one.
    commit: str | None
    #: Processes that wanted a core, on average over the minute before the run began.
    load: float | None
    #: Seconds a thread may hold the GIL while another waits for it.
    switch_interval: float

    @classmethod
    def now(cls) -> Environment:
        """The environment of this process."""
        torch = sys.modules.get("torch")
        return cls(
            python=f"{platform.python_implementation()} {platform.python_version()}",
            platform=platform.platform(),
            cpu=cpu_model(),
            cores=os.cpu_count() or 1,
            usable_cores=usable_cores(),
            torch=version("torch"),
            torch_threads=torch.get_num_threads() if torch is not None else None,
            triton=version("triton"),
            gpu=_gpu("name"),
            driver=_gpu("driver_version"),
            asyncinfer=version("asyncinfer"),
            commit=_commit(Path(__file__).resolve().parent),
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            switch_interval=sys.getswitchinterval(),
        )


def _gpu(field: str) -> str | None:
    lines = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else None


def _commit(folder: Path) -> str | None:
    # An environment inside some other project's checkout is not a checkout of this package.
    if _output("git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "-uno")
    return f"{commit}+" if commit and changed else commit


def _output(*command: str) -> str | None:
    """The output of a program; None if there is no such program or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
