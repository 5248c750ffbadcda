"""Lines of the package by room: `python tests/benchmarks/count_lines.py`."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
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
    """Lines of one module. Blank lines of a docstring are prose."""
    lines = source.splitlines()
    prose = _docstrings(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            prose.add(token.start[0])
    blank = sum(not line.strip() and at not in prose for at, line in enumerate(lines, 1))
    return Lines(len(lines) - len(prose) - blank, len(prose), blank)


def _docstrings(source: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Module(body=[first, *_])
                | ast.ClassDef(body=[first, *_])
                | ast.FunctionDef(body=[first, *_])
                | ast.AsyncFunctionDef(body=[first, *_])
            ):
                match first:
                    case ast.Expr(value=ast.Constant(value=str()), end_lineno=int(last)):
                        found.update(range(first.lineno, last + 1))
    return found


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
