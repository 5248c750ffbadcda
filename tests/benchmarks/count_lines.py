"""Lines of the package by room: `python tests/benchmarks/count_lines.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["PACKAGE", "Lines", "count", "rooms", "table", "total"]

PACKAGE: Final = Path(__file__).resolve().parents[2] / "asyncinfer"


@dataclass(frozen=True, slots=True)
class Lines:
    """Of one or more files."""

    code: int = 0
    #: Docstrings, and lines that hold nothing but a comment.
    prose: int = 0
    blank: int = 0

    @property
    def all(self) -> int:
        return self.code + self.prose + self.blank

    def __add__(self, other: Lines) -> Lines:
        return Lines(self.code + other.code, self.prose + other.prose, self.blank + other.blank)


def count(source: str) -> Lines:
    """Lines of one module. Blank lines of a docstring are prose, those of other strings code."""
    docstrings: set[int] = set()
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                match node.body[:1]:
                    case [ast.Expr(value=ast.Constant(value=str())) as first]:
                        docstrings |= _lines_of(first)
            case ast.Constant(value=str()) | ast.JoinedStr():
                strings |= _lines_of(node)
    prose = blank = 0
    for at, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if at in docstrings or (text.startswith("#") and at not in strings):
            prose += 1
        elif not text and at not in strings:
            blank += 1
    return Lines(len(source.splitlines()) - prose - blank, prose, blank)


def _lines_of(node: ast.Expr | ast.expr) -> set[int]:
    return {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}


@cache
def rooms(package: Path = PACKAGE) -> dict[str, Lines]:
    """Folder or module at the top of the package -> its lines, in the order of names."""
    found: dict[str, Lines] = {}
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0]
        found[room] = found.get(room, Lines()) + count(path.read_text("utf-8"))
    return found


def total(parts: Iterable[Lines]) -> Lines:
    return sum(parts, Lines())


def table() -> list[str]:
    """A line for each room, and one for all of them."""
    found = rooms()
    lines = [f"{'room':<16}{'code':>8}{'prose':>8}{'blank':>8}{'all':>8}"]
    for room, of in [*found.items(), ("total", total(found.values()))]:
        lines.append(f"{room:<16}{of.code:>8,}{of.prose:>8,}{of.blank:>8,}{of.all:>8,}")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
