"""`Inbox`: what other threads ask of the decode thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, Final

__all__ = ["Command", "Inbox"]

#: Seconds of each wait for more commands, and the most waits.
_SETTLE_SECONDS: Final = 0.001
_SETTLE_WAITS: Final = 10


class Command(Enum):
    """What the decode thread is to do. The argument is a request, unless a comment names it."""

    SUBMIT = "submit"
    ABORT = "abort"
    STOP = "stop"
    RESUME = "resume"
    #: Give back what an ended request holds, and report its end.
    RELEASE = "release"
    #: End all requests within so many seconds, which are the argument.
    CLOSE = "close"
    #: A conversation, the argument, waits for the result of a tool.
    WAITING = "waiting"
    #: A conversation, the argument, is over.
    OVER = "over"
    #: The second conversation of a pair, the argument, begins as the first one is now.
    FORK = "fork"


class Inbox:
    """Any thread posts, and the decode thread alone reads."""

    def __init__(self) -> None:
        # `SimpleQueue.put` is reentrant: a finalizer may call it on any thread at any point.
        self.queue: SimpleQueue[tuple[Command, Any]] = SimpleQueue()
        #: The command that woke `wait`, which is read first.
        self.woken_by: list[tuple[Command, Any]] = []
        self._closed = False

    def post(self, command: Command, argument: Any) -> None:
        """Hand over a command. Never blocks and never raises."""
        self.queue.put((command, argument))
        if self._closed:
            # Nobody reads any more, and a command holds a request with its prompt.
            self._drop()

    def empty(self) -> bool:
        """Whether no command waits to be read. Any thread."""
        return not self.woken_by and self.queue.empty()

    def wait(self, seconds: float) -> None:
        """Sleep until something is posted, at most `seconds`."""
        with suppress(Empty):
            self.woken_by.append(self.queue.get(timeout=seconds))

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the request that woke `wait`; 0 where another command did."""
        return sum(request.prompt_len for what, request in self.woken_by if what is Command.SUBMIT)

    def settle(self) -> None:
        """Wait until no command was posted for a millisecond, ten milliseconds at most."""
        for _ in range(_SETTLE_WAITS):
            before = self.queue.qsize()
            time.sleep(_SETTLE_SECONDS)
            if self.queue.qsize() == before:
                return

    def read(self) -> Iterator[tuple[Command, Any]]:
        """Take out what was posted, in its order."""
        # Another thread may close the inbox meanwhile, if this thread was held up.
        with suppress(IndexError):
            while True:
                yield self.woken_by.pop()
        with suppress(Empty):
            while True:
                yield self.queue.get_nowait()

    def close(self) -> list[Any]:
        """Drop all commands, those to come too. Returns the requests that were to be released."""
        dropped = self._drop()
        self._closed = True
        dropped += self._drop()
        return [argument for command, argument in dropped if command is Command.RELEASE]

    def _drop(self) -> list[tuple[Command, Any]]:
        return list(self.read())
