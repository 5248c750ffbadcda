"""Findings can still be planted: code that moves would leave them with nothing to take out.

Whether its test finds each is for `python -m benchmarks.planted_findings`, which takes minutes.
"""

from __future__ import annotations

import pytest
from benchmarks.planted_findings import FINDINGS, TESTS


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_it_takes_out_is_there(finding: str) -> None:
    plant, _ = FINDINGS[finding]
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)


@pytest.mark.parametrize("finding", FINDINGS)
def test_the_test_that_finds_it_is_there(finding: str) -> None:
    _, test = FINDINGS[finding]
    path, _, name = test.partition("::")
    text = (TESTS / path).read_text("utf-8")
    assert f"def {name or 'test_'}" in text


def test_none_is_lost() -> None:
    assert len(FINDINGS) == 62
