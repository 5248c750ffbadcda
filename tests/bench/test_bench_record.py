"""Records, comparisons and the pieces that figures are made of."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import asdict, replace
from pathlib import Path

import anyio
import pytest

from asyncinfer.bench import (
    BenchError,
    Environment,
    Figure,
    Record,
    available_loops,
    changes,
    differences,
)
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.median import median
from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.tables import number
from asyncinfer.bench.workloads import QUICK, WORKLOADS


@pytest.fixture
def record() -> Record:
    return Record(
        benchmark="host",
        options={"running": 16},
        figures=(
            Figure("cost", 4.0, "us", "lower", 8.0),
            Figure("rate", 100.0, "tokens/s", "higher", 120.0),
            Figure("share", 0.5, "cores", "lower"),
        ),
        detail={"loops": []},
    )


def test_a_target_is_met_from_its_own_side(record: Record) -> None:
    assert [figure.met for figure in record.figures] == [True, False, None]


def test_what_is_saved_is_loaded(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    record.save(path)
    assert Record.load(path) == record


def test_the_environment_says_where_it_was(record: Record, tmp_path: Path) -> None:
    environment = Environment.now()
    assert platform.python_version() in environment.python
    assert environment.torch == importlib.metadata.version("torch")
    assert environment.cores >= environment.usable_cores >= 1
    record.save(tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["environment"] == asdict(record.environment)
    assert data["schema"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a record"),
        ('{"schema": 99}', "not a record"),
        ('{"schema": 1, "benchmark": "host"}', "missing"),
    ],
)
def test_a_file_that_is_no_record_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        Record.load(path)


def test_a_missing_file_is_refused(record: Record, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        Record.load(tmp_path / "none.json")
    with pytest.raises(BenchError, match="cannot be written"):
        record.save(tmp_path / "none" / "a.json")


def test_changes_know_which_side_is_better(record: Record) -> None:
    cost, rate, share = record.figures
    after = replace(
        record,
        figures=(
            replace(cost, value=2.0),
            replace(rate, value=50.0),
            Figure("new", 1.0, "", "lower"),
        ),
    )
    found = {change.name: change for change in changes(record, after)}
    assert found["cost"].ratio == 0.5
    assert found["cost"].better is True
    assert found["rate"].better is False
    assert found["share"].after is None
    assert found["share"].ratio is None
    assert found["new"].before is None
    assert all(change.better is None for change in changes(record, record))
    assert share in record.figures


def test_records_of_different_benchmarks_do_not_compare(record: Record) -> None:
    with pytest.raises(BenchError, match="different questions"):
        changes(record, replace(record, benchmark="lag"))


def test_what_else_differs_is_said(record: Record) -> None:
    other = replace(
        record,
        options={"running": 8, "quick": True},
        environment=replace(record.environment, cores=999),
    )
    assert differences(record, record) == ()
    assert differences(record, other) == (
        ("cores", str(record.environment.cores), "999"),
        ("option running", "16", "8"),
        ("option quick", "None", "True"),
    )


def test_quantiles() -> None:
    quantiles = Quantiles.of(range(101))
    assert (quantiles.count, quantiles.mean, quantiles.p50, quantiles.p99, quantiles.max) == (
        101,
        50,
        50,
        99,
        100,
    )
    assert quantiles.curve == pytest.approx(range(101))
    with pytest.raises(BenchError, match="nothing was measured"):
        Quantiles.of([])


def test_the_median_is_a_run_that_happened() -> None:
    assert median(["ccc", "a", "bb"], len) == "bb"
    assert median(["ccc", "a", "bb", "dddd"], len) == "bb"


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.123"), (99.96, "100"), (999.6, "1,000"), (20_000.4, "20,000")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_the_workloads_are_those_of_the_table() -> None:
    assert list(WORKLOADS) == list(QUICK) == ["one", "sixteen", "mixed", "prefill", "shared"]
    assert WORKLOADS["sixteen"].requests == ((128, 128),) * 16
    mixed = WORKLOADS["mixed"].requests
    assert len(mixed) == 64
    assert all(16 <= prompt <= 512 and 16 <= output <= 256 for prompt, output in mixed)
    assert WORKLOADS["prefill"].counted == 1024
    assert WORKLOADS["shared"].cached_tokens == 32 * 512


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_prompts_have_their_lengths_and_share_what_they_should(name: str) -> None:
    work = WORKLOADS[name]
    prompts = work.prompts(4096, 0)
    assert [len(prompt) for prompt in prompts] == [prompt for prompt, _ in work.requests]
    assert all(0 <= token < 4096 for prompt in prompts for token in prompt)
    assert prompts == work.prompts(4096, 0)
    again = work.prompts(4096, 1)
    heads = {tuple(prompt[:16]) for prompt in prompts}
    assert heads.isdisjoint(tuple(prompt[:16]) for prompt in again)
    assert len(heads) == (1 if work.shared else len(prompts))
    assert len({tuple(prompt[: work.shared]) for prompt in prompts}) == (
        1 if work.shared else min(1, len(prompts))
    )


@pytest.mark.parametrize("loop", available_loops())
def test_an_error_of_ours_comes_out_of_its_groups(loop: str) -> None:
    async def fail() -> None:
        raise BenchError("wrong count")

    async def measure() -> None:
        async with anyio.create_task_group() as outer, anyio.create_task_group() as inner:
            outer.start_soon(anyio.sleep, 60)
            inner.start_soon(fail)

    with pytest.raises(BenchError, match="wrong count"):
        run_on(loop, measure)


def test_an_unknown_loop_is_named() -> None:
    with pytest.raises(BenchError, match="'curio' is not installed"):
        run_on("curio", anyio.sleep, 0)
