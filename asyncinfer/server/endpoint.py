"""`Endpoint`: a path of the application: key, body, handler, errors, and clients that leave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final

import anyio
from starlette.types import Receive, Scope, Send

from asyncinfer.server.body import Bodies, ClientLeft
from asyncinfer.server.call import Call
from asyncinfer.server.errors import HttpError, http_error, openai_error
from asyncinfer.server.fields import Fields, sent_names
from asyncinfer.server.keys import Keys
from asyncinfer.server.traffic import Traffic
from asyncinfer.server.turns import take_turn

__all__ = ["Endpoint", "Handler"]

Handler = Callable[[Call], Awaitable[None]]
#: The status that counts requests whose client left before the answer, as nginx has it.
LEFT: Final = 499

ErrorBody = Callable[[HttpError, str], Mapping[str, Any]]


class Endpoint:
    """An ASGI application of one path.

    A client that leaves cancels the handler wherever it waits. An error is the answer as long as
    none has begun, and an event after that.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        *,
        keys: Keys | None,
        traffic: Traffic,
        bodies: Bodies,
        fields: Fields,
        error_body: ErrorBody = openai_error,
        error_event: str | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            path: the name that its requests are counted under.
            keys: None lets everybody in.
            bodies: reads those of requests that have one.
            fields: those of a body.
            error_body: makes the body of an error.
            error_event: the name of an event that tells of one.
            names: engine options that no field takes as it is -> the fields that they are of.
        """
        self._path = path
        self._handler = handler
        self._keys = keys
        self._traffic = traffic
        self._bodies = bodies
        self._error_body = error_body
        self._error_event = error_event
        self._fields = fields
        self._names = names or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        status = 500
        self._traffic.begin()
        try:
            status = await self._answer(call)
        except ClientLeft:
            status = LEFT
            if not call.started:
                # Nobody reads it, but middleware of Starlette fails without an answer.
                with suppress(ClientLeft):
                    await call.data(b"", "text/plain; charset=utf-8", LEFT)
        except anyio.get_cancelled_exc_class():
            status = LEFT
            raise
        finally:
            self._traffic.end(self._path, status)
            # The task that watched for the client refers to the call until garbage is collected.
            call.body = {}

    async def _answer(self, call: Call) -> int:
        """Answer the call; returns the status that was sent. Raises `ClientLeft`, and unforeseen
        errors after the client was told of them."""
        found: Exception | None = None
        left = False

        async def watch() -> None:
            nonlocal left
            await call.gone()
            left = not tasks.cancel_scope.cancel_called  # servers report complete answers, too
            tasks.cancel_scope.cancel()

        if call.cancels:
            try:
                await self._handle(call)
            except Exception as error:
                found = error
        else:
            await take_turn()
            async with anyio.create_task_group() as tasks:
                try:
                    await self._handle(call, partial(tasks.start_soon, watch))
                except Exception as error:
                    found = error
                finally:
                    tasks.cancel_scope.cancel()
        try:
            return await self._ended(call, ClientLeft() if left else found)
        finally:
            # Its traceback refers to this frame.
            del found

    async def _handle(self, call: Call, watch: Callable[[], object] | None = None) -> None:
        """Have the call handled, and `watch` for the client once the body was read."""
        with self._keys.admit(call.headers) if self._keys else nullcontext(call.key) as key:
            call.key = key
            if call.method == "POST":
                await call.read(self._bodies)
                if watch is not None:
                    watch()
            await self._handler(call)

    async def _ended(self, call: Call, found: Exception | None) -> int:
        """The status of a call that was handled or has failed. Raises as `_answer` does."""
        if isinstance(found, ClientLeft):
            raise ClientLeft
        if found is None:
            return 200
        try:
            return await self._tell(call, found)
        finally:
            # Its traceback refers to this frame, and to those that have the body.
            del found

    async def _tell(self, call: Call, found: Exception) -> int:
        """Tell the client of an error, and return the status. Raises an unforeseen error again."""
        # An option may have several names, so that those count which the client has sent.
        names = {**self._names, **sent_names(call.body, self._fields)}
        error = http_error(found, names, call.places)
        body = self._error_body(error, call.request_id)
        if call.begun:
            call.event(body, self._error_event)
            await call.end()
        else:
            await call.json(body, error.status, error.headers)
        if error.foreign:
            try:
                raise found
            finally:
                # Its traceback refers to this frame.
                del found
        return error.status
