"""docs/faults.md, from the table and the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from faults.registry import TESTS, Row

__all__ = ["PAGE", "page"]

PAGE = TESTS.parent / "docs" / "faults.md"

HEAD = """\
# Faults

What can go wrong, what must happen then, and the tests that hold it to that. A test says in a
comment which row it is of (`# fault 17`). This page is written by
`python tests/faults/write_page.py` from `tests/faults/faults.toml` and the comments, and never by
hand; a test fails if it is stale, or if a row has no test.

The ladder of severity: an `InvalidRequest` is raised before any state exists, a `RequestFailed`
ends one stream, an `EngineDead` all of them. No single request may cause the last one.
`EngineClosed` means that you closed the engine.
"""


def page(rows: Sequence[Row], tests: Mapping[int, Sequence[str]]) -> str:
    """The whole page."""
    parts = [HEAD]
    for name, group in groupby(rows, lambda row: row.group):
        parts.append(f"## {name}\n")
        parts += [_entry(row, tests.get(row.number, ())) for row in group]
    return "\n".join(parts)


def _entry(row: Row, tests: Sequence[str]) -> str:
    lines = [f"**{row.number}. {row.fault}** {row.promise}", ""]
    if row.missing:
        lines += [f"*Not there yet:* {row.missing}", ""]
    for path, names in groupby(tests, lambda test: test.partition("::")[0]):
        listed = ", ".join(f"`{name.partition('::')[2]}`" for name in names)
        lines.append(f"- [{Path(path).relative_to('tests')}](../{path}): {listed}")
    if tests:
        lines.append("")
    return "\n".join(lines)
