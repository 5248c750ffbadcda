"""Every claim of docs/security.md names its test, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "security.md").read_text("utf-8")

_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def claims(page: str) -> list[str]:
    """Items of its lists, each with the lines that go on."""
    return [item.strip() for item in re.findall(r"^- (.+(?:\n  .+)*)", page, re.MULTILINE)]


def defined(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_claim_names_a_test() -> None:
    found = claims(PAGE)
    assert len(found) > 30
    assert not [claim for claim in found if not _TEST.search(claim)]


def test_every_test_is_there() -> None:
    named = _TEST.findall(PAGE)
    assert len(named) > 50
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (TESTS / file).is_file() or name not in defined(TESTS / file)
    ]
    assert not missing


def test_a_claim_without_a_test_is_seen() -> None:
    page = "- One.\n  `a.py::test_b`\n- Two,\n  which goes on.\n\nText.\n"
    assert [bool(_TEST.search(claim)) for claim in claims(page)] == [True, False]
