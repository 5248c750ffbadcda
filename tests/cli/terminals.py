"""A program on a terminal of its own, typed at by a test."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

from support import heed_ctrl_c

PROGRAM = Path(__file__).with_name("talk.py")
CTRL_C, CTRL_D = "\x03", "\x04"


def _of_this_terminal() -> None:
    """Ctrl-C that is typed at the program's terminal is a SIGINT for it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    heed_ctrl_c()


class Terminal:
    """Runs `command` on a pseudo-terminal; use it as a context manager."""

    def __init__(self, command: list[str], term: str = "dumb") -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": term},
            preexec_fn=_of_this_terminal,
        )
        os.close(slave)
        #: All that the program has written.
        self.screen = ""
        self._read = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def insist(self, key: str, text: str) -> None:
        """Press `key` until the program writes `text`. A signal that comes between readline's look
        for one and its wait for input goes unnoticed until the next key, in any Python program."""
        for _ in range(4):
            self._settle()
            self.type(key)
            # A program that is only slow must not see the key twice.
            while select.select([self._master], [], [], 30)[0]:
                self._more()
                if text in self.screen[self._read :]:
                    self.until(text)
                    return
        raise AssertionError(f"no {text!r} after {self.screen[-300:]!r}")

    def _settle(self) -> None:
        """Let the program come to its wait for input: its main thread sleeps at ten looks in a
        row, where the system tells."""
        stat, asleep = Path(f"/proc/{self.process.pid}/stat"), 0
        while asleep < 10 and self.process.poll() is None and stat.exists():
            state = stat.read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
            time.sleep(0.005)

    def until(self, text: str, more: int = 0) -> str:
        """What was written since the last call, up to `text` and `more` characters after it."""
        while True:
            at = self.screen.find(text, self._read)
            end = at + len(text) + more
            if at >= 0 and len(self.screen) >= end:
                seen = self.screen[self._read : end]
                self._read = end
                return seen
            self._more()

    def end(self) -> int:
        """The exit code."""
        while self._more(closed_is_fine=True):
            pass
        return self.process.wait(120)

    def _more(self, closed_is_fine: bool = False) -> bool:
        ready, _, _ = select.select([self._master], [], [], 240)
        assert ready, f"silence after {self.screen[-300:]!r}"
        try:
            data = os.read(self._master, 65536)
        except OSError:
            # Linux: the other side is closed.
            assert closed_is_fine, f"ended after {self.screen[-300:]!r}"
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)


def talking(*arguments: str, term: str = "dumb") -> Terminal:
    return Terminal([sys.executable, str(PROGRAM), *arguments], term)
