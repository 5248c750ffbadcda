"""`asyncinfer simulate`: random lives of an engine, everything checked."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import click

from asyncinfer import __version__, plugins
from asyncinfer.bench import Environment
from asyncinfer.cli.app import INTERRUPTED
from asyncinfer.cli.new_file import NewFile
from asyncinfer.cli.plugin_choice import plugin_choice
from asyncinfer.cli.start import raise_again
from asyncinfer.cli.terminal import json_text
from asyncinfer.testing import SimulationReport, SimulationTrace, simulate

__all__ = ["simulate_command"]

_PLUGIN: Final = "NAME[:ARG=VALUE,...]"
#: Actions shown of a trace.
MOST: Final = 40


@click.command("simulate", short_help="Live random lives of an engine, and check everything.")
@click.option(
    "--seed", default=0, show_default=True, help="The first life's; the next has the next."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="Of the model, all lives together.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option(
    "--checking",
    type=click.Choice(["full", "light"]),
    default="full",
    show_default=True,
    help="light checks the scheduler's invariants at every 64th step.",
)
@click.option(
    "--cache-policy",
    type=plugin_choice(plugins.cache_policies, make=True),
    metavar=_PLUGIN,
    help="The cache policy of every life.  [default: by chance]",
)
@click.option(
    "--scheduler",
    type=plugin_choice(plugins.schedulers, make=True),
    metavar=_PLUGIN,
    help="The scheduling policy of every life.  [default: by chance]",
)
@click.option(
    "--shrink",
    type=click.IntRange(min=0),
    default=400,
    show_default=True,
    help="Lives spent on making a failure small.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    help="Where the trace of a failure is written.  [default: here]",
)
@click.option(
    "--replay",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Live a written trace again, and nothing else.",
)
@click.option(
    "--json",
    "json_path",
    type=NewFile(dash=True),
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Print a JSON object, or write it to FILE.",
)
def simulate_command(
    seed: int,
    steps: int,
    jobs: int,
    checking: Literal["full", "light"],
    shrink: int,
    out: Path,
    replay: Path | None,
    json_path: Path | None,
    **chosen: tuple[str, dict[str, Any]] | None,
) -> int:
    """Live random lives of an engine on a fake model, in virtual time, and check everything: each
    token, each wait, each page.

    In a life consumers on one or two event loops read, wait, leave and hang, while steps fail and
    hang, memory is short, threads are interrupted, deadlines pass and the engine is closed. The
    same seed gives the same life.

    Ctrl-C and SIGTERM end it after the lives that run; it says what it did until then. A failure is
    made small and written as a trace, which --replay lives again. The exit code is 1 then, and 130
    after Ctrl-C.
    """
    raise_again()
    given: dict[str, Any] = {name: plugin for name, plugin in chosen.items() if plugin is not None}
    if replay is not None:
        return _replay(replay, given)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # Written first, so that a bad path does not waste a long run.
        raise click.ClickException(f"--out {out}: {error.strerror}") from error
    with _bar(steps) as moved, _told_to_stop() as told:

        def progress(report: SimulationReport) -> bool:
            moved(report)
            return bool(told)

        report = simulate(
            seed, steps, jobs=jobs, checking=checking, shrink=shrink, progress=progress, **given
        )
    for trace in report.failures:
        path = out / f"simulation-{trace.seed}.json"
        trace.save(path)
        click.echo(_story(trace, path), err=True)
    if json_path is None:
        _show(report)
    else:
        options = {"checking": checking, "jobs": jobs, **given}
        with click.open_file(str(json_path), "w") as file:
            click.echo(json.dumps(_values(report) | options, indent=2), file)
    if report.failures:
        return 1
    return INTERRUPTED if signal.SIGINT in told else 0


def _replay(path: Path, chosen: dict[str, Any]) -> int:
    try:
        trace = SimulationTrace.load(path)
        error = trace.run(**chosen)
    except ValueError as problem:
        raise click.UsageError(str(problem)) from problem
    if error is None:
        click.echo(f"{path}: it does not fail any more; it did by: {trace.failure}")
        return 0
    click.echo(f"{path}: {str(error) or repr(error)}", err=True)
    return 1


def _story(trace: SimulationTrace, path: Path) -> str:
    """What failed, and the actions that led to it."""
    lines = [
        f"seed {trace.seed}: {trace.failure}",
        f"  {len(trace.actions)} actions; live them again by: asyncinfer simulate --replay {path}",
        *(f"    {json_text(action, sys.stderr)}" for action in trace.actions[:MOST]),
    ]
    if len(trace.actions) > MOST:
        lines.append(f"    and {len(trace.actions) - MOST} more")
    return "\n".join(lines)


def _values(report: SimulationReport) -> dict[str, Any]:
    machine = Environment.now()
    return {
        "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": machine.commit,
        "cpu": machine.cpu,
        "load": machine.load,
        "seed": report.seed,
        "lives": report.lives,
        "steps": report.steps,
        "seconds": report.seconds,
        "steps_per_second": report.steps_per_second,
        "events": dict(sorted(report.events.items())),
        "failures": [{"seed": trace.seed, "failure": trace.failure} for trace in report.failures],
    }


def _show(report: SimulationReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("event", "times", box=None)
    table.columns[1].justify = "right"
    for event, times in sorted(report.events.items()):
        table.add_row(event, f"{times:,}")
    Console(highlight=False).print(table)
    failed = f"{len(report.failures)} failed" if report.failures else "none failed"
    click.echo(
        f"{report.lives:,} lives, {report.steps:,} steps, {report.steps_per_second:,.0f} a second; "
        f"{failed}"
    )


@contextmanager
def _told_to_stop() -> Iterator[list[int]]:
    """While the block runs, the first Ctrl-C or SIGTERM only puts its number in the list it is
    given. An exception would be raised in the middle of a life, which would count it as its own."""
    told: list[int] = []
    before: dict[int, Any] = {}

    def stop(number: int, frame: object) -> None:
        told.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stop)
    try:
        yield told
    finally:
        restore()


@contextmanager
def _bar(steps: int) -> Iterator[Callable[[SimulationReport], None]]:
    """Shows the steps on stderr while the block runs; nothing if that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda report: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("simulating"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} steps, {task.fields[rate]:,.0f} a second"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=steps, rate=0.0)

        def moved(report: SimulationReport) -> None:
            bar.update(task, completed=report.steps, rate=report.steps_per_second)

        yield moved
