"""The command line on a fake model, as a program: `python talking.py MODE ARGUMENT...`.

MODE "talk" answers some 200 tokens a second, without end; "stuck" never finishes loading. The
program makes the terminal it was given its own, so that Ctrl-C typed there is a SIGINT.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import sys
import termios
import threading
import time
from functools import partial
from typing import Any

import asyncinfer
from asyncinfer.cli import main
from asyncinfer.testing import FakeModel
from asyncinfer.text import ChatTemplate

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ flavour }}"
)


class Talking:
    """A model with a chat template and no end of words."""

    def __init__(self, mode: str = "talk", pace: float = 0.0) -> None:
        self.mode = mode
        self.pace = pace

    def load(self, config: Any, progress: Any) -> Any:
        if self.mode == "stuck":
            print("loading", flush=True)
            threading.Event().wait()
        fake = FakeModel(
            blocks=4096, max_context=60_000, strict=False, gate=lambda *_: time.sleep(self.pace)
        )
        return dataclasses.replace(fake.load(config, progress), template=TEMPLATE)


class TalkingEngine(asyncinfer.Engine):
    """An engine of this model, whichever one a command names."""

    def __init__(self, model: object = None, *, source: Talking | None = None, **options: Any):
        super().__init__(source or Talking(), **options)


if __name__ == "__main__":
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    mode = sys.argv.pop(1)
    asyncinfer.Engine = partial(TalkingEngine, source=Talking(mode, 0.0025))  # type: ignore[misc, assignment]
    # With the arguments of this process, so that it heeds signals as the program does.
    main()
