"""Every row of docs/faults.md has its test, and the page is the one that the tests make."""

from __future__ import annotations

import dataclasses
import re
from importlib import import_module

import pytest
from faults.page import PAGE, page
from faults.registry import Row, find_tests, read_marks, read_rows

ROWS = read_rows()
WRITE = "run: python tests/faults/write_page.py"


def test_there_are_52_rows_in_order() -> None:
    assert [row.number for row in ROWS] == list(range(1, 53))
    assert all(row.fault.endswith(".") and row.promise.endswith(".") for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.number))
def test_a_row_has_a_test(row: Row) -> None:
    if row.missing and not row.partly:
        # Once what it is about exists, its test has to as well.
        assert row.number not in find_tests(), "has a test: take out `missing`"
        assert row.absent, "say how to see that it is not there yet"
    else:
        assert find_tests().get(row.number), f"no test says `# fault {row.number}`"


@pytest.mark.parametrize("row", [r for r in ROWS if r.absent], ids=lambda row: str(row.number))
def test_what_has_no_test_does_not_exist(row: Row) -> None:
    assert not _there(row.absent), f"row {row.number} needs a test: {row.fault}"


def test_no_test_is_of_a_row_that_is_none() -> None:
    assert set(find_tests()) <= {row.number for row in ROWS}


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text("utf-8") == page(ROWS, find_tests()), WRITE


def _there(absent: dict[str, str]) -> list[str]:
    """Public members of classes that match their pattern."""
    found = []
    for path, pattern in absent.items():
        module, _, name = path.rpartition(".")
        kind = getattr(import_module(module), name)
        fields = (
            [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
        )
        members = {*fields, *(member for member in dir(kind) if not member.startswith("_"))}
        found += [f"{path}.{member}" for member in members if re.search(pattern, member)]
    return found


def test_a_feature_that_appears_is_seen() -> None:
    for row in ROWS:
        for path in row.absent:
            assert not _there({path: "^no such thing$"})
    assert _there({"asyncinfer.SamplingParams": "^temp"}) == [
        "asyncinfer.SamplingParams.temperature"
    ]
    assert _there({"asyncinfer.Engine": "^aclo"}) == ["asyncinfer.Engine.aclose"]


# The reader of comments itself.

SOURCE = '''
"""A module. # fault 9"""

VALUES = [1]  # faults 1, 2


@pytest.mark.parametrize("x", VALUES)
def test_a(x: int) -> None:
    assert x


# fault 3
# and why
@mark
async def test_b() -> None:
    # fault 4: inside
    text = "# fault 5"


def test_c() -> None:  # fault 6
    """# fault 7, without much ado"""
'''


def test_comments_and_their_tests() -> None:
    found = read_marks(SOURCE.lstrip(), "t.py")
    everyone = {"t.py::test_a", "t.py::test_b", "t.py::test_c"}
    assert found == {
        9: everyone,
        1: {"t.py::test_a"},
        2: {"t.py::test_a"},
        3: {"t.py::test_b"},
        4: {"t.py::test_b"},
        6: {"t.py::test_c"},
        7: {"t.py::test_c"},
    }


def test_a_comment_of_no_test_is_an_error() -> None:
    for source in ("UNUSED = 1  # fault 1\n", "def helper() -> None:  # fault 1\n    pass\n"):
        with pytest.raises(AssertionError, match="is of no test"):
            read_marks(source, "t.py")
