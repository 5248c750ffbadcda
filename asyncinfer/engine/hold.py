"""`Hold` and `Pin` keep blocks in the prefix cache."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from asyncinfer.bounds import MAX_DEADLINE
from asyncinfer.cache import Conversation
from asyncinfer.checks import check_real
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.spoken import Answered, SpokenMessages
from asyncinfer.engine.uncopied import Uncopied

__all__ = ["Hold", "Keeper", "Pin", "check_ttl"]


def check_ttl(ttl: float | None) -> float:
    """How many seconds something is kept; None means for ever. Raises `InvalidRequest`."""
    if ttl is None:
        return math.inf
    return check_real("ttl", ttl, 0.0, MAX_DEADLINE, open_low=True)


class Keeper(Protocol):
    """Has a prefix cache keep the blocks of a session: `Hold` for an engine in this process,
    `RemoteHold` for a replica. It lets them go when it is closed or collected."""

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], answered: Answered | None
    ) -> SpokenMessages:
        """The conversation as the prompt of its next request."""

    def wait_for_tool(self) -> None:
        """Note that the answer called a tool: the next request brings the result."""

    def fork(self) -> Keeper:
        """A keeper for a second conversation, which begins as this one does."""

    def close(self) -> None:
        """Let the cache keep the blocks no longer. A second call does nothing."""


class Hold(Uncopied):
    """Has the cache keep the blocks of a conversation until it is closed, or collected."""

    def __init__(self, frontend: Frontend, ttl: float | None = None) -> None:
        """`ttl`: seconds after a request for which they are kept, None for ever. Raises
        `InvalidRequest`."""
        self.ttl = ttl
        self.conversation = Conversation(check_ttl(ttl))
        self._frontend = frontend
        self._open = True

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], answered: Answered | None
    ) -> SpokenMessages:
        """See `Keeper`."""
        return SpokenMessages(messages, answered, self.conversation)

    def wait_for_tool(self) -> None:
        """See `Keeper`."""
        self._frontend.post(Command.WAITING, self.conversation)

    def fork(self) -> Hold:
        """See `Keeper`."""
        made = Hold(self._frontend, self.ttl)
        self._frontend.post(Command.FORK, (self.conversation, made.conversation))
        return made

    def close(self) -> None:
        """See `Keeper`."""
        if self._open and self._frontend.here:
            self._frontend.post(Command.OVER, self.conversation)
        self._open = False

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


class Pin(Uncopied):
    """A prompt that the prefix cache keeps. Made by `Engine.pin()`, entered once."""

    def __init__(self, compute: Callable[[], Awaitable[int]], hold: Keeper) -> None:
        """`compute` computes the prompt, for `hold` to keep, and returns its length in tokens."""
        self._compute = compute
        self._hold = hold
        #: Tokens of the prompt, once it is computed. Their full blocks are kept.
        self.prompt_tokens = 0

    async def __aenter__(self) -> Pin:
        try:
            self.prompt_tokens = await self._compute()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Keep it no longer. A second call does nothing."""
        self._hold.close()
