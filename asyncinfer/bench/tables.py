"""Records and comparisons as rich tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from asyncinfer.bench.compare import Change
from asyncinfer.bench.environment import Environment
from asyncinfer.bench.record import Figure, Record

__all__ = ["change_table", "difference_table", "environment_line", "peers_of", "record_tables"]


def record_tables(record: Record) -> list[Table]:
    """The tables of a record, for people."""
    if record.benchmark != "serve":
        tables = [figure_table(f"asyncinfer bench {record.benchmark}", record.figures)]
        failed = _failures(record.detail)
        return [*tables, failure_table(failed)] if failed else tables
    models = record.detail["models"]
    titles = {
        f"{model['model']}: {column['title']}" for model in models for column in model["columns"]
    }
    rest = [figure for figure in record.figures if not figure.name.startswith(tuple(titles))]
    tables = [*map(serve_table, models), figure_table("all of it", rest)]
    failed = [found for model in models for found in _failures(model)]
    return [*tables, failure_table(failed)] if failed else tables


def _failures(detail: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was not measured and why, parts and peers of `asyncinfer bench h200` included."""
    found = [*detail.get("not_measured", {}).items()]
    for part in detail.get("parts", ()):
        if part["error"] is not None:
            found.append((part["name"], part["error"]))
        found += part["detail"].get("failed", {}).items()
    return found


def failure_table(found: Sequence[tuple[str, str]]) -> Table:
    """What was not measured."""
    table = Table(title="not measured", title_justify="left")
    table.add_column("part")
    table.add_column("why")
    for row in found:
        table.add_row(*map(Text, row))
    return table


def serve_table(model: Mapping[str, Any]) -> Table:
    """One model of `asyncinfer bench serve`: a row per workload, one with interference."""
    peers = list(dict.fromkeys(peer for column in model["columns"] for peer in peers_of(column)))
    table = Table(title=f"asyncinfer bench serve: {model['model']}", title_justify="left")
    table.add_column("work")
    versions = model.get("peer_versions", {})
    titles = [f"{peer}\n{versions.get(peer, '')}".strip() for peer in peers]
    for title in ("tokens/s", *titles, "ceiling", "TTFT p50", "ITL p50", "p99"):
        table.add_column(title, justify="right")
    for column in model["columns"]:
        itl, theirs = column["itl"], peers_of(column)
        table.add_row(
            column["title"],
            number(median(column["rates"])),
            *(number(median(theirs[peer])) if theirs.get(peer) else "" for peer in peers),
            number(column["ceiling"]) if "ceiling" in column else "",
            number(column["ttft"]["p50"]),
            number(itl["p50"]) if itl else "",
            number(itl["p99"]) if itl else "",
        )
        if interference := column.get("interference"):
            theirs = interference["peer_rates"]
            table.add_row(
                "  beside busy programs",
                number(median(interference["rates"])),
                *(number(median(theirs[peer])) if theirs.get(peer) else "" for peer in peers),
            )
    return table


def peers_of(column: Mapping[str, Any]) -> Mapping[str, Sequence[float]]:
    """Each peer's rates. Records from when there was only one peer have a list."""
    rates: Any = column["peer_rates"]
    return {"transformers": rates} if isinstance(rates, list) else rates


def figure_table(title: str, figures: Sequence[Figure]) -> Table:
    """Figures with their targets, and a pass or a shortfall."""
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("target", justify="right")
    table.add_column("")
    for figure in figures:
        table.add_row(
            Text(figure.name), number(figure.value), figure.unit, _target(figure), _verdict(figure)
        )
    return table


def environment_line(environment: Environment) -> str:
    """The environment in one paragraph."""
    return ", ".join(
        f"{field.name} {getattr(environment, field.name)}"
        for field in fields(environment)
        if getattr(environment, field.name) is not None
    )


def change_table(found: Sequence[Change]) -> Table:
    """Figures of two records and their ratio, after over before."""
    table = Table(title="figures", title_justify="left")
    table.add_column("figure")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_column("unit")
    table.add_column("ratio", justify="right")
    table.add_column("")
    for change in found:
        verdict = Text("")
        if change.better is not None:
            verdict = Text("better", "green") if change.better else Text("worse", "red")
        table.add_row(
            Text(change.name),
            number(change.before.value) if change.before else "-",
            number(change.after.value) if change.after else "-",
            change.unit,
            f"{change.ratio:.2f}" if change.ratio is not None else "-",
            verdict,
        )
    return table


def difference_table(found: Sequence[tuple[str, str, str]]) -> Table:
    """What else differs between two runs."""
    table = Table(title="not the same in both runs", title_justify="left")
    table.add_column("what")
    table.add_column("before")
    table.add_column("after")
    for row in found:
        table.add_row(*map(Text, row))
    return table


def number(value: float) -> str:
    """Three significant digits, whole numbers above a thousand."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _target(figure: Figure) -> str:
    if figure.target is None:
        return ""
    return f"{'<=' if figure.better == 'lower' else '>='} {number(figure.target)}"


def _verdict(figure: Figure) -> Text:
    if figure.met is None:
        return Text("")
    return Text("pass", "green") if figure.met else Text("shortfall", "red")
