"""`RemoteHold` has a replica's prefix cache keep the blocks of a session or a pin."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from asyncinfer.engine import Answered, SpokenMessages, check_ttl
from asyncinfer.remote.dispatcher import Dispatcher
from asyncinfer.remote.link import Held
from asyncinfer.remote.router import Route

__all__ = ["RemoteHold", "RemoteMessages"]


class RemoteHold:
    """A `Keeper` at the replica that had the last request. Earlier replicas keep nothing: load
    moved the session away from them, or they were lost."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        ttl: float | None = None,
        began: str | None = None,
        route: Route | None = None,
    ) -> None:
        """`began`, `route`: the name and route of the forked session. Raises `InvalidRequest`."""
        check_ttl(ttl)
        self.held: Held = Held(secrets.token_hex(8), ttl, began)
        self._dispatcher = dispatcher
        #: The route of the last request.
        self._route = route
        self._open = True

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], answered: Answered | None
    ) -> RemoteMessages:
        """See `Keeper`."""
        return RemoteMessages(messages, answered, self)

    def at(self, route: Route) -> Held | None:
        """Move to a request's replica. Returns what that replica is to keep; None once closed."""
        if not self._open:
            return None
        if self._route is not None and self._route.replica != route.replica:
            self._post("release", self.held.name)
        self._route = route
        return self.held

    def wait_for_tool(self) -> None:
        """See `Keeper`."""
        self._post("wait_for_tool", self.held.name)

    def fork(self) -> RemoteHold:
        """See `Keeper`."""
        made = RemoteHold(self._dispatcher, self.held.ttl, self.held.name, self._route)
        self._dispatcher.router.forked(self.held.name, made.held.name)
        self._post("keep", made.held)
        return made

    def close(self) -> None:
        """See `Keeper`."""
        if self._open:
            self._open = False
            self._post("release", self.held.name)

    def _post(self, method: str, argument: Held | str) -> None:
        # No replica knows this session before its first request.
        if self._route is not None:
            self._dispatcher.post(self._route, method, argument)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


class RemoteMessages(SpokenMessages):
    """A session's messages on their way to a replica."""

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], answered: Answered | None, hold: RemoteHold
    ) -> None:
        super().__init__(messages, answered)
        self.hold = hold
