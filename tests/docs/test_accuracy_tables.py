"""The tables of `docs/quantization.md` are those of the records beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.accuracy_table import accuracy_table

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["shipped", "smollm2"])
def test_the_table_is_the_record(name: str) -> None:
    lines = accuracy_table(DOCS / "benchmarks" / f"accuracy-{name}.json")
    assert len(lines) > 10
    assert "\n".join(lines) in (DOCS / "quantization.md").read_text("utf-8")
