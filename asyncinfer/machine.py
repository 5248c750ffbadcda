"""The processor that a process has, how much of it, and the versions of libraries."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Collection
from pathlib import Path

__all__ = [
    "allowed_cores",
    "busy_seconds",
    "cache_bytes",
    "cpu_model",
    "cpu_quota",
    "cpuinfo",
    "fast_cores",
    "read_lines",
    "running_threads",
    "usable_cores",
    "version",
]

#: The fields of a core's line in `/proc/stat` that count it as free: "idle" and "iowait".
_FREE = (3, 4)
#: The fields of the line that are summed: guests' time is part of others.
_TIMES = 8
#: Units of a cache's size.
_UNITS = {"K": 1 << 10, "M": 1 << 20}
#: A core is fast if it has at least this share of the fastest core's capacity.
_FAST = 0.75


def cpu_model() -> str:
    """The processor's name."""
    for name in ("model name", "Model"):
        found = cpuinfo().get(name)
        if found:
            return found
    return platform.processor() or platform.machine()


def allowed_cores() -> frozenset[int]:
    """The cores that the process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many cores the process may run on."""
    return len(allowed_cores())


def fast_cores(cores: Collection[int], root: Path = Path("/")) -> int | None:
    """How many of these cores are fast, on a processor with fast and slow cores (Arm's big.LITTLE,
    Intel's hybrids); a core with two hardware threads counts once. None: all cores are alike, as
    far as the system tells. `root` is the folder of `sys`."""
    about = root / "sys/devices"
    found = {core: _capacity(core, about) for core in cores}
    known = {core: capacity for core, capacity in found.items() if capacity is not None}
    least = _FAST * max(known.values(), default=0.0)
    if len(known) < len(found) or all(capacity >= least for capacity in known.values()):
        return None
    fast = [core for core, capacity in known.items() if capacity >= least]
    siblings = "topology/thread_siblings_list"
    return len({tuple(read_lines(_core(core, about) / siblings)) or core for core in fast})


def _core(core: int, about: Path) -> Path:
    return about / f"system/cpu/cpu{core}"


def _capacity(core: int, about: Path) -> float | None:
    """A core's capacity, in units of its processor's kind; None where the system does not tell."""
    for line in read_lines(_core(core, about) / "cpu_capacity"):
        if line.strip().isdigit():
            return float(line)
    # Intel's hybrids have two lists of cores instead.
    for capacity, kind in ((1.0, "cpu_core"), (0.5, "cpu_atom")):
        if any(core in _listed(line) for line in read_lines(about / kind / "cpus")):
            return capacity
    return None


def _listed(text: str) -> set[int]:
    """The numbers in a list such as "0-3,8"."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found


def busy_seconds(cores: Collection[int], root: Path = Path("/")) -> float | None:
    """Seconds that these cores have computed since the system started, time that a hypervisor gave
    to others included; None where the system does not tell. `root` is the folder of `proc`."""
    ticks, found = 0, 0
    for line in read_lines(root / "proc/stat"):
        name, *times = line.split()
        core = name.removeprefix("cpu")
        if core != name and core.isdigit() and int(core) in cores:
            found += 1
            ticks += sum(int(t) for i, t in enumerate(times[:_TIMES]) if i not in _FREE)
    return ticks / os.sysconf("SC_CLK_TCK") if found == len(cores) else None


def running_threads(root: Path = Path("/")) -> int | None:
    """Threads of the whole machine that compute or wait for a core at this moment, including the
    calling one; None where the system does not tell. `root` is the folder of `proc`."""
    for line in read_lines(root / "proc/loadavg"):
        running = line.split()[3].partition("/")[0]
        return int(running) if running.isdigit() else None
    return None


def version(library: str) -> str | None:
    """The library's version; None where it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the process's control group and those around it give it, cgroup v2
    or v1; None: no limit. `root` is where `proc` and `sys` lie."""
    mounted = root / "sys/fs/cgroup"
    found = []
    for line in read_lines(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            folder, read = mounted, _quota_v2
        elif "cpu" in controllers.split(","):
            folder, read = mounted / "cpu", _quota_v1
        else:
            continue
        # A container sees its own group as the root, and the path of its host.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        groups = (folder.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))
        found += [quota for quota in map(read, groups) if quota is not None]
    return min(found, default=None)


def _quota_v2(group: Path) -> float | None:
    for line in read_lines(group / "cpu.max"):
        quota, _, period = line.partition(" ")
        return _ratio(quota, period or "100000")
    return None


def _quota_v1(group: Path) -> float | None:
    quota, period = (
        next(iter(read_lines(group / f"cpu.cfs_{name}_us")), "") for name in ("quota", "period")
    )
    return _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    # "max" and -1 say that there is no limit.
    if not quota.isdigit() or not period.strip().isdigit() or not int(period):
        return None
    return int(quota) / int(period)


def cache_bytes(level: int, root: Path = Path("/")) -> int | None:
    """Bytes of the first core's cache of this level, of data or of all; None where the system does
    not say. `root` is the folder of `sys`."""
    for about in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, number, size = (
            "".join(read_lines(about / name)) for name in ("type", "level", "size")
        )
        if number == str(level) and kind != "Instruction":
            count, unit = size[:-1], size[-1:]
            if count.isascii() and count.isdigit() and unit in _UNITS:
                return int(count) * _UNITS[unit]
    return None


def read_lines(path: Path) -> list[str]:
    """Lines of a text file; none where it cannot be read."""
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def cpuinfo() -> dict[str, str]:
    """What `/proc/cpuinfo` says of the first core; empty where there is none."""
    found: dict[str, str] = {}
    for line in read_lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found
