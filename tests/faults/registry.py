"""The rows of the fault table, and the tests that say which of them they are of.

A test says so in a comment, `# fault 17` or `# faults 17, 18`: inside of it, on the lines just
above it, or in its module's docstring for all tests of the module. A comment on a value of the
module counts for the tests that use that value.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

__all__ = ["Row", "find_tests", "read_marks", "read_rows"]

TESTS = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("faults.toml")

_MARK = re.compile(r"# faults? (\d+(?:, ?\d+)*)")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Row:
    """One fault, and what must happen."""

    number: int
    group: str
    fault: str
    promise: str
    #: Why there is no test yet, or not of all of it: what would be tested does not exist.
    missing: str = ""
    #: Classes of the package, and a pattern that none of their fields and methods matches as long
    #: as that is so.
    absent: dict[str, str] = field(default_factory=dict)
    #: Part of it exists, and has tests.
    partly: bool = False


def read_rows() -> list[Row]:
    """In the order of the page."""
    data = tomllib.loads(TABLE.read_text("utf-8"))
    return [Row(group=group["name"], **row) for group in data["group"] for row in group["row"]]


@cache
def find_tests() -> dict[int, list[str]]:
    """Fault -> tests, as `path::name`, sorted."""
    found: dict[int, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS.parent).as_posix()
        for fault, tests in read_marks(path.read_text("utf-8"), name).items():
            found.setdefault(fault, set()).update(tests)
    return {fault: sorted(tests) for fault, tests in sorted(found.items())}


def read_marks(source: str, path: str) -> dict[int, set[str]]:
    """The same of one file. A comment that is of no test is an `AssertionError`."""
    found: dict[int, set[str]] = {}
    if _MARK.search(source) is None:
        return found
    tree = ast.parse(source)
    for line, faults in _marks(source):
        tests = _owners(tree, source.splitlines(), line)
        assert tests, f"{path}:{line}: is of no test: {source.splitlines()[line - 1].strip()}"
        for fault in faults:
            found.setdefault(fault, set()).update(f"{path}::{name}" for name in tests)
    return found


def _marks(source: str) -> Iterator[tuple[int, list[int]]]:
    """Lines of comments and docstrings that name faults."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        docstring = token.type == tokenize.STRING and token.line.lstrip().startswith(('"""', "'''"))
        if token.type == tokenize.COMMENT or docstring:
            for match in _MARK.finditer(token.string):
                line = token.start[0] + token.string[: match.start()].count("\n")
                yield line, [int(number) for number in match[1].split(",")]


def _owners(tree: ast.Module, lines: list[str], line: int) -> list[str]:
    """Names of the tests that a comment on this line is of."""
    docstring = tree.body[0] if ast.get_docstring(tree) is not None else None
    if docstring is not None and line <= (docstring.end_lineno or 0):
        return [test.name for test in _tests(tree)]
    while line < len(lines) and lines[line - 1].lstrip().startswith("#"):
        line += 1
    for node in tree.body:
        if _first(node) <= line <= (node.end_lineno or node.lineno):
            if isinstance(node, _Function):
                return [node.name] if node.name.startswith("test") else _users(tree, {node.name})
            if isinstance(node, ast.ClassDef):
                return _users(tree, {node.name})
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            return _users(tree, {name.id for name in targets if isinstance(name, ast.Name)})
    return []


def _first(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _tests(tree: ast.Module) -> list[_Function]:
    return [n for n in tree.body if isinstance(n, _Function) and n.name.startswith("test")]


def _users(tree: ast.Module, names: set[str]) -> list[str]:
    """Tests that name one of `names`, in their bodies or decorators."""
    return [
        test.name
        for test in _tests(tree)
        if any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(test))
    ]
