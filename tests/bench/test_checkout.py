"""Where `asyncinfer bench` finds what measures the engine's internals, and what a wheel says."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from bench.test_bench_command import refusal
from benchmarks import commands

from asyncinfer.bench import (
    BenchError,
    HostOptions,
    Record,
    checkout,
    from_checkout,
    measure_host,
    record_tables,
)
from asyncinfer.cli import main
from asyncinfer.cli.bench import INTERNALS, bench


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package as it is where a wheel was installed: without tests beside it."""
    monkeypatch.setattr(checkout, "TESTS", tmp_path)


def test_a_checkout_has_every_command() -> None:
    context = click.Context(bench)
    for name in INTERNALS:
        assert bench.get_command(context, name) is getattr(commands, name)
        assert getattr(commands, name).short_help == INTERNALS[name]
    assert from_checkout("commands") is commands


def test_what_is_in_no_checkout_either_is_named() -> None:
    with pytest.raises(BenchError, match="tests/benchmarks is missing"):
        from_checkout("nothing")


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize("name", INTERNALS)
def test_a_wheel_says_what_is_missing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, name, "--quick", "--json", "out.json")
    assert "tests/benchmarks is missing" in said
    assert "in a checkout of the source" in said


@pytest.mark.usefixtures("wheel")
def test_a_wheel_lists_the_commands_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in INTERNALS)


@pytest.mark.usefixtures("wheel")
def test_a_wheel_measures_the_host_but_for_its_steps() -> None:
    result = measure_host(
        HostOptions(
            loops=("asyncio",), running=4, steps=5, streams=10, rate=500, seconds=1.0, repeat=1
        )
    )
    assert (result.scheduler, result.runner) == (None, None)
    assert len(result.figures()) == 7
    (why,) = result.not_measured.values()
    assert "tests/benchmarks is missing" in why
    record = Record("host", {}, result.figures(), {"not_measured": dict(result.not_measured)})
    assert [table.title for table in record_tables(record)][-1] == "not measured"
