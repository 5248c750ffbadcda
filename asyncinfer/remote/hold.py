"""`RemoteHold`: what the prefix cache of a replica keeps for a session, or for a pin."""

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
    """A `Keeper` at the replica that had its last request. One that had requests before keeps
    nothing: load has moved them, or it was lost."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        ttl: float | None = None,
        began: str | None = None,
        route: Route | None = None,
    ) -> None:
        """`began`, `route`: the name and route of a fork's origin. Raises `InvalidRequest`."""
        check_ttl(ttl)
        self.told: Held = Held(secrets.token_hex(8), ttl, began)
        self._dispatcher = dispatcher
        #: That of the last request.
        self._route = route
        self._open = True

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], answered: Answered | None
    ) -> RemoteMessages:
        """See `Keeper`."""
        return RemoteMessages(messages, answered, self)

    def at(self, route: Route) -> Held | None:
        """A request goes to a replica, which is to keep this for it; nothing once it is closed."""
        if not self._open:
            return None
        if self._route is not None and self._route.replica != route.replica:
            self._post("release", self.told.name)
        self._route = route
        return self.told

    def wait_for_tool(self) -> None:
        """See `Keeper`."""
        self._post("wait_for_tool", self.told.name)

    def fork(self) -> RemoteHold:
        """See `Keeper`."""
        made = RemoteHold(self._dispatcher, self.told.ttl, self.told.name, self._route)
        self._dispatcher.router.forked(self.told.name, made.told.name)
        self._post("keep", made.told)
        return made

    def close(self) -> None:
        """See `Keeper`."""
        if self._open:
            self._open = False
            self._post("release", self.told.name)

    def _post(self, method: str, told: Held | str) -> None:
        # Without a request no replica has heard of it.
        if self._route is not None:
            self._dispatcher.post(self._route, method, told)

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
