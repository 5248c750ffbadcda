"""The plot of `asyncinfer bench soak`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["plot_soak"]


def plot_soak(figure: Any, detail: Mapping[str, Any]) -> None:
    """Memory, lag, tokens and pages over time. `detail` is a record's."""
    memory, lag, tokens, pages = figure.subplots(2, 2, sharex=True).flat
    samples = detail["load"]["samples"]
    minutes = [its["seconds"] / 60 for its in samples]
    memory.plot(minutes, [its["rss"] for its in samples], label="resident")
    if all(its["in_use"] is not None for its in samples):
        memory.plot(minutes, [its["in_use"] for its in samples], label="taken from malloc")
    memory.set_ylabel("MiB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize="small")
    lag.plot(minutes, [its["lag_max"] for its in samples], label="max", linewidth=0.8)
    lag.plot(minutes, [its["lag_p99"] for its in samples], label="p99")
    lag.set_yscale("log")
    lag.set_ylabel("ms the loop is late")
    lag.legend()
    tokens.plot(minutes, [its["tokens"] / 1e6 for its in samples])
    tokens.set_ylabel("million tokens checked")
    pages.plot(minutes, [its["pages_free"] for its in samples], label="pages free or cached")
    pages.plot(minutes, [its["held"] for its in samples], label="streams held")
    pages.axhline(detail["load"]["pages_total"], color="black", linestyle=":", label="all pages")
    pages.legend(fontsize="small")
    for axes in (tokens, pages):
        axes.set_xlabel("minutes")
