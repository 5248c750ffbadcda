"""The plot of `asyncinfer bench load`."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

__all__ = ["plot_load"]


def plot_load(figure: Any, detail: Mapping[str, Any]) -> None:
    """Seconds of each loader, and the host memory it took."""
    time, memory = figure.subplots(1, 2, sharey=True)
    runs = detail["runs"]
    names = list(reversed(runs))
    for axes, key, scale in ((time, "seconds", 1.0), (memory, "peak_bytes", 1e9)):
        values = [median(run[key] for run in runs[name]) / scale for name in names]
        axes.barh(names, values)
    time.set_xlabel(
        f"s for {detail['bytes'] / 1e9:.3g} GB, {detail['dtype']} on {detail['device']}"
    )
    memory.set_xlabel("GB of host memory at most")
