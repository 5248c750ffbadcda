"""`benchmarks.formats`, and the docs' table of its record."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.formats import FORMATS, SHAPE, WORK, formats_table, measure_formats

from asyncinfer.bench import Record

DOCS = Path(__file__).parents[2] / "docs"
SMALL = {
    **SHAPE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_a_checkpoint_and_a_file() -> None:
    names = ("fp8-blocks", "MXFP4")
    rows = measure_formats(names, layers=1, repeat=1, shape=SMALL)
    assert [(row.format, row.work) for row in rows] == [
        (name, work) for name in names for work in WORK
    ]
    assert all(min(row.ratio, row.plain, row.tokens_per_second) > 0 for row in rows)


@pytest.mark.parametrize("name", ["formats", "formats-amx"])
def test_the_docs_have_the_record(name: str) -> None:
    rows = Record.load(DOCS / "benchmarks" / f"{name}.json").detail["rows"]
    table = list(formats_table(rows))
    assert {row["format"] for row in rows} == set(FORMATS)
    assert "\n".join(table) in (DOCS / "quantization.md").read_text("utf-8")
