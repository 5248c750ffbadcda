"""Plots of records; they need matplotlib, which the `bench` extra brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from asyncinfer.bench.cache_plot import plot_cache
from asyncinfer.bench.checkout import from_checkout
from asyncinfer.bench.load_plot import plot_load
from asyncinfer.bench.record import BenchError, Record
from asyncinfer.bench.soak import plot_soak
from asyncinfer.bench.tables import peers_of

__all__ = ["check_plot", "save_plot"]

Draw = Callable[[Any, Mapping[str, Any]], None]


def check_plot(path: Path, benchmark: str | None = None) -> None:
    """Raise `BenchError` if a plot, one of `benchmark` if that is given, could not be drawn to
    `path`: better before a long run."""
    if benchmark is not None:
        _plot_of(benchmark)
    if not path.parent.is_dir():
        raise BenchError(f"{path}: the folder does not exist")
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise BenchError(
            "--plot needs matplotlib: pip install 'asyncinfer[bench]', or leave it out"
        ) from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".") not in known:
        raise BenchError(f"{path}: the name must end in one of {', '.join(sorted(known))}")


def save_plot(record: Record, path: Path) -> None:
    """Draw a record. Everything in the plot comes from its JSON."""
    check_plot(path)
    draw = _plot_of(record.benchmark)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    draw(figure, record.detail)
    figure.suptitle(f"asyncinfer bench {record.benchmark}, {record.recorded}", fontsize="medium")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from error


def _plot_of(benchmark: str) -> Draw:
    """What draws a record's detail. Raises `BenchError` for a benchmark that has no plot."""
    plots = _PLOTS
    if benchmark in _OF_INTERNALS:
        plots = from_checkout("roofline_plot").PLOTS
    if benchmark not in plots:
        known = ", ".join(sorted([*_PLOTS, *_OF_INTERNALS]))
        raise BenchError(f"there is no plot of {benchmark!r}: leave out --plot; known: {known}")
    return plots[benchmark]


def _host(figure: Any, detail: Mapping[str, Any]) -> None:
    cost, late = figure.subplots(1, 2)
    loops = detail["loops"]
    names = [result["loop"] for result in loops]
    engine = [result["tokens"]["engine"] for result in loops]
    loop = [result["tokens"]["loop"] for result in loops]
    cost.bar(names, engine, label="the engine's threads")
    cost.bar(names, loop, bottom=engine, label="the event loop")
    cost.axhline(8.0, color="black", linestyle=":", label="target")
    cost.set_ylabel("us of CPU per token until it is held")
    cost.legend()
    for result in loops:
        _curve(late, result["streams"]["latency"]["curve"], result["loop"])
    late.set_xlabel("ms from a step's end until a chunk is held")
    late.set_ylabel("percent of chunks")
    late.legend()


def _lag(figure: Any, detail: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    for lag in detail["models"]:
        _curve(axes, lag["busy"]["curve"], f"{lag['model']}, busy")
        _curve(axes, lag["idle"]["curve"], f"{lag['model']}, idle", linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("ms that a task of the event loop ran late")
    axes.set_ylabel("percent of its wake-ups")
    axes.legend()


def _serve(figure: Any, detail: Mapping[str, Any]) -> None:
    models = detail["models"]
    for axes, result in zip(_row(figure, len(models)), models, strict=True):
        columns = result["columns"]
        engines = {"asyncinfer": [column["rates"] for column in columns]}
        for peer in dict.fromkeys(peer for column in columns for peer in peers_of(column)):
            engines[peer] = [peers_of(column).get(peer, ()) for column in columns]
        places, width = range(len(columns)), 0.8 / len(engines)
        for at, (name, rates) in enumerate(engines.items()):
            left = [place + (at - (len(engines) - 1) / 2) * width for place in places]
            axes.bar(left, [median(each) if each else 0.0 for each in rates], width, label=name)
        axes.set_xticks(places, [column["name"] for column in columns])
        axes.set_title(result["model"])
        axes.set_ylabel("tokens/s")
        axes.set_yscale("log")
        axes.legend()


def _row(figure: Any, count: int) -> Sequence[Any]:
    return [figure.add_subplot(1, count, place + 1) for place in range(count)]


def _curve(axes: Any, curve: Sequence[float], label: str, **style: Any) -> None:
    axes.plot(curve, range(len(curve)), label=label, **style)


def _plugins(figure: Any, detail: Mapping[str, Any]) -> None:
    rows, tokens = figure.subplots(1, 2, width_ratios=(2, 1))
    costs = sorted(detail["samplers"].items(), key=lambda cost: cost[1])
    rows.barh([name for name, _ in costs], [1e3 * seconds for _, seconds in costs])
    rows.set_xlabel(f"ms of CPU to sample {detail['rows']} rows")
    observed = detail["observers"]
    names = [name.removeprefix("an ").replace(" of ", "\nof ") for name in observed]
    tokens.bar(names, [token_cost["host"] for token_cost in observed.values()])
    tokens.set_ylabel("us of CPU per token")


def _accuracy(figure: Any, detail: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    rows = detail["rows"]
    names = [f"{row['dtype']}\nweights {row['weights']}\nKV {row['kv']}" for row in rows]
    axes.bar(names, [row["perplexity"] for row in rows])
    low = min(row["perplexity"] for row in rows)
    axes.set_ylim(0.95 * low)
    axes.set_ylabel("perplexity per token")


def _constrained(figure: Any, detail: Mapping[str, Any]) -> None:
    speeds, late = figure.subplots(1, 2)
    names = ("plain", "free", "forced")
    speeds.bar(names, [detail["turn"][name] for name in names])
    speeds.set_ylabel("tokens/s")
    _curve(late, detail["arriving"]["curve"], "while new schemas arrive")
    _curve(late, detail["quiet"]["curve"], "without", linestyle=":")
    late.set_xscale("log")
    late.set_xlabel("ms that a task of the event loop ran late")
    late.set_ylabel("percent of its wake-ups")
    late.legend()


_PLOTS: Final[Mapping[str, Draw]] = {
    "accuracy": _accuracy,
    "constrained": _constrained,
    "cache": plot_cache,
    "host": _host,
    "lag": _lag,
    "load": plot_load,
    "plugins": _plugins,
    "serve": _serve,
    "soak": plot_soak,
}
#: Measured, and drawn, by what only a checkout has.
_OF_INTERNALS: Final = ("decode", "h200", "kernels", "prefill")
