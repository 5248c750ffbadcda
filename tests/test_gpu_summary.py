"""A run on a GPU is one process, in each dtype; its summary counts what ran, names what failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from gpu_summary import check_workers, gpu_summary, machine_lines


def report(
    name: str,
    outcome: Literal["passed", "failed", "skipped"],
    when: Any = "call",
    *,
    gpu: bool = True,
) -> pytest.TestReport:
    # A folder of that name is a keyword, too.
    properties = [("gpu", True)] if gpu else []
    return pytest.TestReport(
        name, ("", 0, ""), {"gpu": 1}, outcome, None, when, user_properties=properties
    )


def test_tests_are_counted_by_file() -> None:
    found = gpu_summary(
        [
            report("tests/a.py::one", "passed", "setup"),
            report("tests/a.py::one", "passed"),
            report("tests/a.py::one", "passed", "teardown"),
            report("tests/a.py::two", "failed"),
            report("tests/b.py::one", "skipped", "setup"),
            report("tests/b.py::two", "failed", "setup"),
            report("tests/c.py::one", "failed", gpu=False),
        ]
    )
    assert found == [
        "tests/a.py: 1 failed, 1 passed",
        "tests/b.py: 1 failed, 1 skipped",
        "failed: tests/a.py::two",
        "failed: tests/b.py::two",
    ]


def test_without_a_gpu_there_is_nothing_to_say() -> None:
    assert gpu_summary([report("tests/a.py::one", "skipped", "setup")]) == []
    assert gpu_summary([]) == []


def test_a_module_that_is_skipped_whole_is_no_test() -> None:
    module = pytest.CollectReport("tests/d.py", "skipped", None, [])
    assert gpu_summary([module]) == []
    assert gpu_summary([module, report("tests/a.py::one", "passed")]) == ["tests/a.py: 1 passed"]


def test_the_machine_is_named() -> None:
    assert any("torch" in line for line in machine_lines())


def test_a_gpu_is_one_workers() -> None:
    check_workers("gpu", 0)
    check_workers("not gpu", 4)
    check_workers("", 4)
    with pytest.raises(pytest.UsageError, match="-n 0"):
        check_workers("gpu", 2)


def test_engines_run_in_each_dtype_that_has_kernels(request: pytest.FixtureRequest) -> None:
    path = Path(__file__).parent / "engine" / "test_gpu_decode.py"
    names = [item.name for item in pytest.Module.from_parent(request.session, path=path).collect()]
    for dtype in ("float32", "bfloat16", "float16"):
        assert f"test_draws_are_the_same_however_far_ahead[{dtype}-options0]" in names
