"""The command line `asyncinfer bench`: options, files, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from asyncinfer.bench import Record
from asyncinfer.cli import main
from asyncinfer.cli.bench import bench


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncinfer", "bench", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def printed(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """What a command prints, in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["bench", *map(str, args)])
    said = capsys.readouterr()
    assert end.value.code == 0, said.err
    return said.out


def refusal(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """What a command that ends with an error says, in this process."""
    with pytest.raises(SystemExit) as end:
        main(["bench", *map(str, args)])
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    return said


def test_a_run_prints_saves_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "host.json", tmp_path / "host.png"
    done = command(
        "host", "--quick", "--backend", "asyncio", "--repeat", 1, "--json", path, "--plot", plot
    )
    assert done.returncode == 0, done.stderr
    assert "schedule + update, 16 running" in done.stdout
    assert "[asyncio]" in done.stdout
    record = Record.load(path)
    assert record.benchmark == "host"
    assert record.options["running"] == 16
    assert record.options["loops"] == ["asyncio"]
    data = json.loads(path.read_text())
    assert {*data} == {
        "schema",
        "benchmark",
        "options",
        "figures",
        "detail",
        "environment",
        "recorded",
    }
    for figure in data["figures"]:
        assert {*figure} == {"name", "value", "unit", "better", "target"}
        assert isinstance(figure["value"], float)
    # A figure is what the detail says, not a number of its own.
    detail = data["detail"]["loops"][0]["tokens"]
    (host,) = [f for f in data["figures"] if f["name"].startswith("host CPU per token")]
    assert host["value"] == detail["host"] == pytest.approx(detail["engine"] + detail["loop"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert printed(capsys, "show", path) == done.stdout
    same = printed(capsys, "compare", path, path)
    assert "1.00" in same
    assert "better" not in same


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "lag", "--plot", tmp_path / "lag.nonsense")
    assert "must end in one of" in said
    said = refusal(capsys, "lag", "--plot", tmp_path / "none" / "lag.png")
    assert "the folder does not exist" in said
    said = refusal(capsys, "speculate", "--plot", tmp_path / "a.png")
    assert "there is no plot of 'speculate'" in said


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["http", "--backend", "trio"], "'trio' is not one of 'asyncio', 'uvloop'"),
        (["http", "--seconds", "nan"], "'nan' is not a finite number"),
        (["soak", "--minutes", "inf"], "'inf' is not a finite number"),
        (["serve", "--peer", "bogus"], "--peer 'bogus': the peers are"),
        # It was a file of this name.
        (["lag", "--json", "-"], "'-' is no file"),
    ],
)
def test_wrong_usage_is_told_as_such(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *options])
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    said = refusal(capsys, "host", "--quick", "--plot", tmp_path / "a.png")
    assert "pip install 'asyncinfer[bench]'" in said


def test_a_file_that_is_no_record_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    assert "is not a record" in refusal(capsys, "compare", path, path)


def test_plugins_are_measured_saved_and_drawn(tmp_path: Path) -> None:
    path, plot = tmp_path / "plugins.json", tmp_path / "plugins.png"
    done = command("plugins", "--quick", "--repeat", 1, "--json", path, "--plot", plot)
    assert done.returncode == 0, done.stderr
    assert "min-p by a plugin" in " ".join(done.stdout.split())
    record = Record.load(path)
    assert record.benchmark == "plugins"
    assert record.options["rows"] == record.detail["rows"] == 4
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", bench.list_commands(click.Context(bench)))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", name, "--help"])
    assert end.value.code == 0
    assert f"Usage: asyncinfer bench {name} " in capsys.readouterr().out
