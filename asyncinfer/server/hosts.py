"""Which origins and hosts an application accepts, and how it refuses all others. `Hosts` is here
since Starlette's `TrustedHostMiddleware` refuses in plain text, not by a protocol's JSON error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from asyncinfer.checks import check_strings, checking_config
from asyncinfer.errors import InvalidConfig
from asyncinfer.server.call import Call, headers_of
from asyncinfer.server.errors import HttpError, anthropic_error, openai_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Hosts", "check_hosts", "check_origins", "refuse"]

#: A name or an address without its port.
_NAME: Final = r"(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)"
#: Browsers leave out the usual ports.
_ORIGIN: Final = re.compile(
    rf"\*|(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://{_NAME}(?::\d{{1,5}})?"
)
_HOST: Final = re.compile(rf"\*|(?:\*\.)?{_NAME}|[0-9a-f]*(?::[0-9a-f]*){{2,7}}", re.IGNORECASE)


def check_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """`cors_origins` of `create_app`. Raises `InvalidConfig` for what no browser sends."""
    bound = (
        "must be '*' or an origin as browsers send it, in small letters and without path"
        " and usual port: 'https://example.com', 'http://localhost:3000'"
    )
    return _checked("cors_origins", origins, _ORIGIN, bound)


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """`allowed_hosts` of `create_app`. Raises `InvalidConfig` for what is no host's name."""
    known = "'example.com', '*.example.com', '::1'"
    bound = f"must be '*' or a name without scheme and port: {known}"
    return _checked("allowed_hosts", hosts, _HOST, bound)


def _checked(
    name: str, values: Sequence[str], known: re.Pattern[str], bound: str
) -> tuple[str, ...]:
    with checking_config():
        checked = check_strings(name, values, 256, 256)
    for value in checked:
        if known.fullmatch(value) is None:
            raise InvalidConfig(name, value, bound)
    return checked


class Hosts:
    """Middleware that refuses requests whose `Host` is not in `allowed`."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        small = [name.lower().strip("[]") for name in allowed]
        self._names = frozenset(small)
        #: How names that match a wildcard end, after at least one character.
        self._ends = tuple(name[1:] for name in small if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            header = headers_of(scope).get(b"host", b"").decode("latin-1")
            name = (
                re.sub(r":\d*$", "", header) if header.count(":") < 2 or "]" in header else header
            )
            name = name.lower().strip("[]")
            if not ("*" in self._names or name in self._names or name.endswith(self._ends)):
                message = f"Host={header[:80]!r}: no host that is served here; see allowed_hosts"
                error = HttpError(400, "invalid_request_error", message, code="host_not_allowed")
                await refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


async def refuse(error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with `error`, in the form of the protocol that the path belongs to."""
    call = Call(scope, receive, send)
    path = call.path.removeprefix(scope.get("root_path", ""))
    meant = path.removeprefix("/v1").removeprefix("/v1")
    body = anthropic_error if meant.startswith("/messages") else openai_error
    await call.json(body(error, call.request_id), error.status, error.headers)
