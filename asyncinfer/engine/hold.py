"""`Hold` and `Pin`: what the prefix cache keeps before all else."""

from __future__ import annotations

import math
from collections.abc import Callable

from asyncinfer.bounds import MAX_DEADLINE
from asyncinfer.cache import Conversation
from asyncinfer.checks import check_real
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.stream import Stream

__all__ = ["Hold", "Pin"]


class Hold:
    """Has the cache keep the blocks of a conversation until it is closed, or collected."""

    def __init__(self, frontend: Frontend, ttl: float | None = None) -> None:
        """`ttl`: seconds after a request for which they are kept, None for ever. Raises
        `InvalidRequest`."""
        self.ttl = ttl
        seconds = math.inf
        if ttl is not None:
            seconds = check_real("ttl", ttl, 0.0, MAX_DEADLINE, open_low=True)
        self.conversation = Conversation(seconds)
        self._frontend = frontend
        self._open = True

    def wait_for_tool(self) -> None:
        """The answer has called a tool, whose result the next request has."""
        self._frontend.post(Command.WAITING, self.conversation)

    def fork(self) -> Hold:
        """A hold of a second conversation, which begins as this one."""
        made = Hold(self._frontend, self.ttl)
        self._frontend.post(Command.FORK, (self.conversation, made.conversation))
        return made

    def close(self) -> None:
        """Let the cache keep the blocks no longer. A second call does nothing."""
        if self._open and self._frontend.here:
            self._frontend.post(Command.OVER, self.conversation)
        self._open = False

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


class Pin:
    """A prompt that the prefix cache keeps. Made by `Engine.pin()`, entered once."""

    def __init__(self, compute: Callable[[], Stream], hold: Hold) -> None:
        self._compute = compute
        self._hold = hold
        #: Tokens of the prompt, once it is computed. Their full blocks are kept.
        self.prompt_tokens = 0

    async def __aenter__(self) -> Pin:
        try:
            done = await self._compute()
        except BaseException:
            self.close()
            raise
        self.prompt_tokens = done.usage.prompt_tokens
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Keep it no longer. A second call does nothing."""
        self._hold.close()
