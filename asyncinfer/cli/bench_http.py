"""`asyncinfer bench http`: the application and the in-process clients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from asyncinfer.bench import HttpOptions, measure_http
from asyncinfer.cli.bench_options import count, loop, number, quick, recorded, repeat
from asyncinfer.cli.bench_run import run_bench

__all__ = ["http"]


@click.command(short_help="What do HTTP and the in-process clients cost?")
@count("--streams", 200, "Held at once.", 2)
@number("--rate", 4000, "Tokens a second of all streams together.", least=1)
@number("--seconds", 10.0, "How long clients come, and the idle loop is watched.", least=0.1)
@count("--tokens", 64, "Of an answer that is read whole.", 2)
@count("--calls", 1000, "In-process calls of each kind.")
@partial(loop, loops=("asyncio", "uvloop"))
@quick
@repeat()
@recorded
def http(json_path: Path | None, plot: Path | None, quick: bool, **options: Any) -> None:
    """The cost of the HTTP application and the in-process clients, on a fake model.

    Streams over sockets whose clients, in a process of their own, leave every second answer at a
    random moment: how late the server's event loop runs its tasks, and what is still held after.
    Calls by OpenAI's client in process, in CPU time, beside the engine's own and the client's.
    """
    if quick:
        options |= {"streams": 8, "rate": 400.0, "seconds": 0.5, "tokens": 8, "calls": 50}
        options |= {"repeat": 1}
    run_bench("http", HttpOptions(**options), measure_http, json_path, plot)
