"""The plot of `asyncinfer bench cache`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["plot_cache"]


def plot_cache(figure: Any, detail: Mapping[str, Any]) -> None:
    """Hit rates by capacity beside the optimum, and CPU per block. `detail` is a record's."""
    rates, costs = figure.subplots(1, 2, width_ratios=(3, 2))
    total = detail["total"]
    optimum = sorted((int(blocks), hits / total) for blocks, hits in detail["optimum"].items())
    rates.plot(*zip(*optimum, strict=True), color="black", linestyle=":", label="optimum (offline)")
    names = list(dict.fromkeys(replay["policy"] for replay in detail["replays"]))
    markers = "os^vD<>pPX*"
    for index, name in enumerate(names):
        points = sorted(
            (replay["blocks"], replay["hits"] / total, replay["microseconds"])
            for replay in detail["replays"]
            if replay["policy"] == name
        )
        blocks, hit_rate, cost = zip(*points, strict=True)
        style = {"marker": markers[index % len(markers)], "markersize": 4, "color": f"C{index}"}
        rates.plot(blocks, hit_rate, label=name, **style)
        costs.plot(blocks, cost, **style)
    rates.set_ylabel("blocks found in the cache, part of all")
    costs.set_ylabel("us of CPU per block")
    costs.set_ylim(bottom=0)
    for axes in (rates, costs):
        axes.set_xscale("log")
        axes.set_xlabel("blocks of the cache")
    rates.legend(fontsize="small")
