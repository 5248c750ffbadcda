"""`TalkingEngine`: an engine of a fake model that talks."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import asyncinfer
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
