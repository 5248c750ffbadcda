"""Runs of `asyncinfer simulate --json` as a record that adds them up:

python -m benchmarks.simulated docs/benchmarks/simulation.json run.json ...
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from math import fsum
from pathlib import Path
from typing import Any

__all__ = ["add_runs", "total"]


def add_runs(record: Path, paths: Sequence[Path]) -> None:
    """Add runs to the record, or begin one."""
    runs = json.loads(record.read_text("utf-8"))["runs"] if record.exists() else []
    runs += [json.loads(path.read_text("utf-8")) for path in paths]
    record.write_text(as_text(runs), "utf-8")


def as_text(runs: Sequence[dict[str, Any]]) -> str:
    """The record: the sum, and below it each run in a row, with its commit, seeds and steps."""
    rows = ",\n".join(json.dumps(run, allow_nan=False) for run in runs)
    return f'{{"total": {json.dumps(total(runs), indent=1)},\n"runs": [\n{rows}\n]}}\n'


def total(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sum of some runs."""
    events = Counter[str]()
    for run in runs:
        events.update(run["events"])
    return {
        "runs": len(runs),
        "lives": sum(run["lives"] for run in runs),
        "steps": sum(run["steps"] for run in runs),
        # The same in every Python: `sum` rounds floats differently from 3.12 on.
        "seconds": fsum(run["seconds"] for run in runs),
        "failures": sum(len(run["failures"]) for run in runs),
        "events": dict(sorted(events.items())),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    given = parser.parse_args()
    add_runs(given.record, given.runs)
