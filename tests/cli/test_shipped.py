"""The command line on the shipped model: the real engine, as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from cli.terminals import CTRL_C, CTRL_D, Terminal

from asyncinfer.cli import main

COMMAND = [sys.executable, "-m", "asyncinfer"]


def test_generate_completes_python(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "def add(a, b):", "--max-tokens", "24", "-t", "0"]
    done = subprocess.run(
        [*COMMAND, *line], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\n    ")
    with pytest.raises(SystemExit):
        main([*line, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] + "\n" == done.stdout
    assert answer["usage"]["completion_tokens"] == 24


def test_loading_shows_bytes_and_leaves_nothing_behind() -> None:
    line = ["generate", "def add(a, b):", "--max-tokens", "4"]
    with Terminal([*COMMAND, *line], term="xterm") as terminal:
        assert terminal.end() == 0
        assert re.search(r"loading .*[\d.]+/[\d.]+ MB", terminal.screen)
        # Back up one line, clear it: the bar is gone when the text begins.
        assert "\x1b[1A\x1b[2Kdef add(a, b):" in terminal.screen


def test_chat_on_a_terminal() -> None:
    with Terminal([*COMMAND, "chat", "--system", "sorting", "--max-tokens", "1500"]) as terminal:
        terminal.until("\n> ")
        terminal.type("sort a list\n")
        terminal.until("sort a list", more=80)
        terminal.type(CTRL_C)
        # The answer is some 400 characters long.
        assert len(terminal.until("\n> ")) < 300
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert "Error" not in terminal.screen


def test_a_device_that_is_none() -> None:
    done = subprocess.run(
        [*COMMAND, "generate", "x", "--device", "toaster"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert "toaster" in done.stderr
    assert "Traceback" not in done.stderr
