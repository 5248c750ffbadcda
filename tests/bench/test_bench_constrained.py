"""`asyncinfer bench constrained` on the small draft model: what it says it measured, it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncinfer.bench import ConstrainedOptions, measure_constrained
from asyncinfer.bench.constrained import new_schema
from asyncinfer.builtin import DRAFT_PATH
from asyncinfer.cli import main


def test_every_figure_is_measured() -> None:
    options = ConstrainedOptions(model=str(DRAFT_PATH), running=3, tokens=24, schemas=4, repeat=1)
    heard: list[str] = []
    result = measure_constrained(options, heard.append)
    figures = {figure.name: figure for figure in result.figures()}
    assert figures["compile p50"].value > 0
    assert result.compile.count == 4
    assert 0.2 < figures["share of tokens forced"].value < 1
    assert figures["constrained / unconstrained"].value > 0
    assert result.turn.plain > 0
    assert result.mask > 0
    assert heard


def test_schemas_differ() -> None:
    texts = {json.dumps(new_schema(i, salt)) for i in range(9) for salt in ("a", "b")}
    assert len(texts) == 18


def test_a_record_and_a_plot(tmp_path: Path) -> None:
    line = ["bench", "constrained", "-m", str(DRAFT_PATH), "--quick"]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    with pytest.raises(SystemExit) as ended:
        main([*line, *files])
    assert ended.value.code == 0
    record = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert record["benchmark"] == "constrained"
    assert (tmp_path / "a.png").stat().st_size > 1000
