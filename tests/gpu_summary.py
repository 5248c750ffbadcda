"""What a run of the tests on a GPU found, in a few lines that are worth sending."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch

from asyncinfer.kernels.verdicts import driver_version
from asyncinfer.machine import version

__all__ = ["check_workers", "gpu_summary", "machine_lines"]


def check_workers(expression: str, workers: int) -> None:
    """Tests chosen by `expression` (of `-m`) that need a GPU run in one process: workers would
    share its memory, and what one of them measures would hold what others took."""
    if expression == "gpu" and workers:
        raise pytest.UsageError("-m gpu needs -n 0: tests measure the GPU's memory")


def gpu_summary(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """Passed, failed and skipped tests with the property `gpu`, by file, and the names of those
    that failed. None were run: nothing. Of modules that are skipped whole nothing is said."""
    files: dict[str, Counter[str]] = {}
    failed = []
    for report in reports:
        if isinstance(report, pytest.CollectReport):
            continue
        # A test that is skipped, or whose fixtures fail, has no call.
        if ("gpu", True) not in report.user_properties or (report.when != "call" and report.passed):
            continue
        files.setdefault(report.nodeid.partition("::")[0], Counter())[report.outcome] += 1
        if report.failed:
            failed.append(report.nodeid)
    if all(set(counts) == {"skipped"} for counts in files.values()):
        return []
    rows = [
        f"{name}: " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in sorted(counts))
        for name, counts in sorted(files.items())
    ]
    return [*rows, *(f"failed: {name}" for name in failed)]


def machine_lines() -> list[str]:
    """Each GPU, and what drives it."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        found.append(f"{about.name}, sm_{about.major}{about.minor}")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("asyncinfer", "torch", "triton"))
    return [*found, f"driver: {driver_version()}", libraries]
