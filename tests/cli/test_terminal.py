"""On a real (pseudo-)terminal: Ctrl-C, Ctrl-D, the prompt's echo. # fault 15"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.terminals import CTRL_C, CTRL_D, talking
from support import heed_ctrl_c


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    with talking("talk", "chat", "-t", "0") as terminal:
        terminal.until("\n> ")
        for question in ("hello", "again"):
            terminal.type(f"{question}\n")
            terminal.until(question, more=50)
            terminal.type(CTRL_C)
            terminal.until("\n> ")
            assert terminal.process.poll() is None
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert "Traceback" not in terminal.screen
        assert "Error" not in terminal.screen


def test_ctrl_c_at_the_prompt_forgets_the_line() -> None:
    with talking("talk", "chat", "--max-tokens", "5", "-t", "0") as terminal:
        terminal.until("\n> ")
        terminal.type("hel")
        terminal.until("hel")
        terminal.insist(CTRL_C, "\n> ")
        # Would be the question "hel/lost" if the line were still there.
        terminal.type("/lost\n")
        terminal.until("Unknown command /lost")
        terminal.type("/help\n")
        terminal.until("whatever follows.")
        # Only a program that reads its prompt sees a Ctrl-D.
        terminal.until("\n> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_ctrl_c_at_an_empty_prompt_leaves() -> None:
    for said in ("", "hello\n"):
        with talking("talk", "chat", "--max-tokens", "5", "-t", "0") as terminal:
            terminal.until("\n> ")
            if said:
                # The line before does not count as typed.
                terminal.type(said)
                terminal.until("\n> ")
            terminal.insist(CTRL_C, "\n")
            assert terminal.end() == 0
            assert "Traceback" not in terminal.screen


def test_ctrl_c_ends_generate() -> None:
    with talking("talk", "generate", "hello", "--max-tokens", "50000") as terminal:
        terminal.until("hello", more=50)
        terminal.type(CTRL_C)
        assert terminal.end() == 130
        assert "Traceback" not in terminal.screen


def test_ctrl_c_while_a_model_loads() -> None:
    for command in (("generate", "hello"), ("chat",)):
        with talking("stuck", *command) as terminal:
            terminal.until("loading")
            terminal.type(CTRL_C)
            assert terminal.end() == 130
            assert "Traceback" not in terminal.screen


#: Stands for a library that begins with native code, where an exception is lost.
LIBRARY = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    print("lives on")
except KeyboardInterrupt:
    print("lost")
"""


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    "start", [("-m", "asyncinfer"), ("-c", "import asyncinfer.cli as c; c.main()")]
)
def test_ctrl_c_while_a_library_is_imported(
    library: str, start: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / f"{library}.py").write_text(LIBRARY)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for command in (("generate", "hello", "-m", "embedded"), ("models",), ("plan", "embedded")):
        if (library, command) == ("torch", ("models",)):
            # It does without.
            continue
        done = subprocess.run(
            [sys.executable, *start, *command],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            preexec_fn=heed_ctrl_c,
        )
        # Shells show 130 for it.
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_terminal_gets_the_prompt_the_text_and_a_summary() -> None:
    with talking("talk", "generate", "hello", "--max-tokens", "40", "-t", "0") as terminal:
        assert terminal.end() == 0
        assert terminal.screen.lstrip().startswith("hello")
        assert "40 tokens, " in terminal.screen
        assert "tokens/s, length" in terminal.screen
        # The fake model says every byte; those that would drive the terminal are not shown.
        assert not {chr(code) for code in (*range(9), 11, 12, *range(14, 27))} & {*terminal.screen}


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    for no_color, term, styled in (("", "xterm", True), ("1", "xterm", False), ("", "dumb", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        with talking("talk", "generate", "hello", "--max-tokens", "4", term=term) as terminal:
            assert terminal.end() == 0
            summary = terminal.screen[terminal.screen.index("4 tokens, ") - 4 :]
            assert ("\x1b[" in summary) == styled
