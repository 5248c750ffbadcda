"""`asyncinfer bench pace`, small: that what is said to go on really goes on. No times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncinfer.bench import PaceOptions, measure_pace
from asyncinfer.builtin import DRAFT_PATH
from asyncinfer.cli import main

SMALL = {"model": str(DRAFT_PATH), "streams": 2, "repeat": 1}


def test_every_figure_is_measured() -> None:
    heard: list[str] = []
    result = measure_pace(PaceOptions(prompt_tokens=600, step_target=0.002, **SMALL), heard.append)
    figures = {figure.name: figure for figure in result.figures()}
    assert len(figures) == 6
    assert all(figure.value > 0 for figure in figures.values())
    assert figures["between tokens p99"].target == 4.0
    # The same prompt in many chunks, and in one.
    assert result.paced.gaps.count > result.unpaced.gaps.count
    assert any("inf" in line for line in heard)


def test_a_record(tmp_path: Path) -> None:
    file = tmp_path / "pace.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "pace", "--quick", "-m", str(DRAFT_PATH), "--json", str(file)])
    assert ended.value.code == 0
    record = json.loads(file.read_text("utf-8"))
    assert record["benchmark"] == "pace"
    assert record["options"]["prompt_tokens"] == 200
