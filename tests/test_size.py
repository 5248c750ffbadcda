"""The package does not grow: what comes in makes room for itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.count_lines import PACKAGE, Lines, count, rooms, table, total

#: Lines of the package, prose and blank ones included. It may be lowered, never raised.
MOST = 47_650
MODULE = '''"""Of two lines.

Blank ones count as prose here."""

# A comment.
x = 1  # behind code


def f() -> str:
    """Says why."""
    ...
    return """no docstring,

# and no comment"""
'''


def test_the_package_does_not_grow(report: Callable[[str], None]) -> None:
    for line in table():
        report(line)
    now = total(rooms().values()).all
    assert now <= MOST, f"{now - MOST} lines too many: delete as many, or do without"


def test_lines_are_told_apart() -> None:
    assert count(MODULE) == Lines(code=6, prose=5, blank=3)
    assert count("") == Lines()


def test_every_line_is_counted_once() -> None:
    paths: list[Path] = [*PACKAGE.rglob("*.py")]
    assert len(paths) > 100
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in paths)
    assert total(rooms().values()).all == lines
