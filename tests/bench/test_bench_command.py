"""The command line `asyncinfer bench`: options, files, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncinfer.bench import Record


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncinfer", "bench", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_run_prints_saves_and_draws(tmp_path: Path) -> None:
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
    shown = command("show", path)
    assert shown.returncode == 0
    assert shown.stdout == done.stdout
    same = command("compare", path, path)
    assert same.returncode == 0
    assert "1.00" in same.stdout
    assert "better" not in same.stdout


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_run(tmp_path: Path) -> None:
    done = command("lag", "--plot", tmp_path / "lag.nonsense")
    assert done.returncode == 1
    assert "must end in one of" in done.stderr
    assert "Traceback" not in done.stderr
    done = command("lag", "--plot", tmp_path / "none" / "lag.png")
    assert "the folder does not exist" in done.stderr


def test_a_plot_without_matplotlib_names_the_extra(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib.backend_bases'] = None\n"
        "from asyncinfer.cli import main\n"
        f"main(['bench', 'host', '--quick', '--plot', {str(tmp_path / 'a.png')!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "pip install 'asyncinfer[bench]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_that_is_no_record_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    done = command("compare", path, path)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "is not a record" in done.stderr


def test_plugins_are_measured_saved_and_drawn(tmp_path: Path) -> None:
    path, plot = tmp_path / "plugins.json", tmp_path / "plugins.png"
    done = command("plugins", "--quick", "--repeat", 1, "--json", path, "--plot", plot)
    assert done.returncode == 0, done.stderr
    assert "min-p by a plugin" in " ".join(done.stdout.split())
    record = Record.load(path)
    assert record.benchmark == "plugins"
    assert record.options["rows"] == record.detail["rows"] == 4
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["host", "lag", "serve", "plugins", "show", "compare"])
def test_every_command_has_help(name: str) -> None:
    done = command(name, "--help")
    assert done.returncode == 0
    assert "Usage: asyncinfer bench" in done.stdout
