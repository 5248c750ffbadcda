"""The plot of `asyncinfer bench soak`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["plot_soak"]


def plot_soak(figure: Any, detail: Mapping[str, Any]) -> None:
    """Memory, lag, tokens and pages over time. `detail` is a record's."""
    memory, lag, tokens, pages = figure.subplots(2, 2, sharex=True).flat
    samples = detail["load"]["samples"]
    minutes = [sample["seconds"] / 60 for sample in samples]
    memory.plot(minutes, [sample["rss"] for sample in samples], label="resident")
    if all(sample["in_use"] is not None for sample in samples):
        memory.plot(minutes, [sample["in_use"] for sample in samples], label="taken from malloc")
    memory.set_ylabel("MiB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize="small")
    lag.plot(minutes, [sample["lag_max"] for sample in samples], label="max", linewidth=0.8)
    lag.plot(minutes, [sample["lag_p99"] for sample in samples], label="p99")
    lag.set_yscale("log")
    lag.set_ylabel("ms the loop is late")
    lag.legend()
    tokens.plot(minutes, [sample["tokens"] / 1e6 for sample in samples])
    tokens.set_ylabel("million tokens checked")
    pages.plot(minutes, [sample["pages_free"] for sample in samples], label="pages free or cached")
    pages.plot(minutes, [sample["held"] for sample in samples], label="streams held")
    pages.axhline(detail["load"]["pages_total"], color="black", linestyle=":", label="all pages")
    pages.legend(fontsize="small")
    for axes in (tokens, pages):
        axes.set_xlabel("minutes")
