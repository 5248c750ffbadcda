"""`asyncinfer simulate`: what it prints, its exit codes, replays."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import asyncinfer
from asyncinfer.cli import main
from asyncinfer.engine.deadlines import Deadlines
from asyncinfer.testing.simulator import campaign

Capture = pytest.CaptureFixture[str]


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(["simulate", *args])
    assert isinstance(done.value.code, int)
    return done.value.code


def test_lives_that_do_not_fail(capsys: Capture) -> None:
    assert run("--seed", "3", "--steps", "100") == 0
    out = capsys.readouterr().out
    assert "ended: whole" in out
    assert "none failed" in out


def test_json(capsys: Capture) -> None:
    assert run("--steps", "50", "--checking", "light", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] >= 50
    assert report["failures"] == []
    assert report["events"]["steps"] == report["steps"]


def test_a_failure_and_its_replay(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Deadlines, "discard", lambda self, request: None)
        assert run("--steps", "500", "--out", str(tmp_path)) == 1
        captured = capsys.readouterr()
        assert "1 failed" in captured.out
        (path,) = tmp_path.glob("simulation-*.json")
        assert f"--replay {path}" in captured.err
        assert '["submit", {' in captured.err
        assert run("--replay", str(path)) == 1
        assert capsys.readouterr().err.startswith(f"{path}: I")
    assert run("--replay", str(path)) == 0
    assert "does not fail any more" in capsys.readouterr().out


def test_wrong_options(capsys: Capture, tmp_path: Path) -> None:
    assert run("--scheduler", "nobody") == 2
    assert "nobody" in capsys.readouterr().err
    path = tmp_path / "no-trace.json"
    path.write_text("[]")
    assert run("--replay", str(path)) == 2
    assert "is no trace of a simulation" in capsys.readouterr().err


def test_a_file_of_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert run("--seed", "7", "--steps", "40", "--json", str(path)) == 0
    values = json.loads(path.read_text())
    assert (values["seed"], values["checking"], values["failures"]) == (7, "full", [])
    assert values["version"] == asyncinfer.__version__
    assert values["steps"] == values["events"]["steps"] >= 40


@pytest.mark.parametrize(
    "command", [["simulate"], ["doctor"], ["bench", "host"], ["bench", "pace"]]
)
def test_a_file_that_cannot_be_is_told_before_the_work(
    command: list[str], capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = "simulate.simulate", "doctor.examine_machine", "bench.run_bench", "bench_pace.run_bench"
    for work in works:
        # What would work meets something that cannot be called.
        monkeypatch.setattr(f"asyncinfer.cli.{work}", None)
    with pytest.raises(SystemExit) as done:
        main([*command, "--json", str(tmp_path / "no" / "a.json")])
    assert done.value.code == 2
    assert "a.json: the folder does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_it_can_be_stopped_and_says_what_it_did(
    number: signal.Signals, code: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, handler = campaign.live, signal.getsignal(number)

    def live_and_stop(seed: int, *args: object) -> object:
        if seed == 3:
            os.kill(os.getpid(), number)
        return live(seed, *args)

    monkeypatch.setattr(campaign, "live", live_and_stop)
    assert run("--steps", str(10**8), "--json") == code
    assert json.loads(capsys.readouterr().out)["lives"] == 4
    assert signal.getsignal(number) is handler


def test_the_folder_of_traces_is_made_before_a_long_run(capsys: Capture, tmp_path: Path) -> None:
    assert run("--steps", "1", "--out", str(tmp_path / "new" / "folder")) == 0
    assert (tmp_path / "new" / "folder").is_dir()
    file = tmp_path / "file"
    file.write_text("")
    assert run("--steps", str(10**8), "--out", str(file / "below")) == 1
    assert "below: Not a directory" in capsys.readouterr().err
