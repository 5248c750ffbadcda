"""docs/benchmarks/simulation.json: what was simulated in all."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from benchmarks.simulated import add_runs, total

PATH = Path(__file__).parents[2] / "docs" / "benchmarks" / "simulation.json"


def test_runs_add_up() -> None:
    data = json.loads(PATH.read_text("utf-8"))
    runs = data["runs"]
    assert data["total"] == total(runs)
    assert data["total"]["failures"] == 0
    for run in runs:
        assert run["events"]["steps"] == run["steps"] > 0
    # A life that two runs lived counts once.
    spans = sorted((run["commit"], run["seed"], run["seed"] + run["lives"]) for run in runs)
    for (commit, _, end), (other, begin, _) in pairwise(spans):
        assert commit != other or end <= begin


def test_runs_are_added(tmp_path: Path) -> None:
    runs = [
        {
            "lives": 2,
            "steps": 9,
            "seconds": 0.5,
            "failures": [],
            "events": {"steps": 9, "fault": 1},
        },
        {"lives": 1, "steps": 4, "seconds": 0.25, "failures": [{}], "events": {"steps": 4}},
    ]
    record, path = tmp_path / "record.json", tmp_path / "run.json"
    for run in runs:
        path.write_text(json.dumps(run))
        add_runs(record, [path])
    data = json.loads(record.read_text())
    assert data["runs"] == runs
    events = {"fault": 1, "steps": 13}
    sums = {"runs": 2, "lives": 3, "steps": 13, "seconds": 0.75, "failures": 1}
    assert data["total"] == {**sums, "events": events}
