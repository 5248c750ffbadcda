"""Achieved time against the floor, for decode steps, prefills and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["PLOTS"]


def plot_steps(figure: Any, detail: Mapping[str, Any]) -> None:
    """Points of `bench decode` or `bench prefill`."""
    _floors(figure.subplots(), detail["points"], detail["kind"])


def plot_kernels(figure: Any, detail: Mapping[str, Any]) -> None:
    """Points of `bench kernels`."""
    _kernels(figure.subplots(), detail["points"])


def plot_gpu(figure: Any, detail: Mapping[str, Any]) -> None:
    """Parts of `bench h200`, as far as they were measured."""
    parts = {part["name"]: part["detail"] for part in detail["parts"] if part["detail"]}
    known = [name for name in ("decode", "prefill", "kernels") if name in parts]
    for place, name in enumerate(known):
        axes = figure.add_subplot(1, len(known), place + 1)
        if name == "kernels":
            _kernels(axes, parts[name]["points"])
        else:
            _floors(axes, parts[name]["points"], name)
        axes.set_title(name)


def _kernels(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    for kernel in dict.fromkeys(point["kernel"] for point in points):
        shown = [point for point in points if point["kernel"] == kernel]
        axes.plot([p["floor_us"] for p in shown], [p["us"] for p in shown], ".", label=kernel)
    _diagonal(axes, "us", [(p["floor_us"], p["us"]) for p in points])


def _floors(axes: Any, points: Sequence[Mapping[str, Any]], kind: str) -> None:
    for shape in dict.fromkeys(point["shape"] for point in points):
        shown = [point for point in points if point["shape"] == shape]
        axes.plot([p["floor_ms"] for p in shown], [p["ms"] for p in shown], "o", label=shape)
    _diagonal(axes, f"ms of a {kind}", [(p["floor_ms"], p["ms"]) for p in points])


def _diagonal(axes: Any, unit: str, pairs: Sequence[tuple[float, float]]) -> None:
    """The floor itself, and twice and ten times its time."""
    ends = [min(map(min, pairs), default=1.0) / 2, max(map(max, pairs), default=1.0) * 2]
    for factor, style in ((1, "-"), (2, "--"), (10, ":")):
        label = "floor" if factor == 1 else f"{100 // factor} % of the floor"
        times = [factor * end for end in ends]
        axes.plot(ends, times, color="black", linestyle=style, linewidth=0.8, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"floor, {unit}")
    axes.set_ylabel(f"measured, {unit}")
    axes.legend(fontsize="x-small")


#: By the name of the benchmark.
PLOTS = {"decode": plot_steps, "h200": plot_gpu, "kernels": plot_kernels, "prefill": plot_steps}
