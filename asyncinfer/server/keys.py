"""`ApiKey`: what the holder of a bearer key may do; `Keys`: those of an application."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from asyncinfer.bounds import MAX_PRIORITY, MAX_SCOPE_CHARS
from asyncinfer.checks import check_integer, check_string, checking_config
from asyncinfer.errors import InvalidConfig, Size
from asyncinfer.server.errors import HttpError, overloaded

__all__ = ["ApiKey", "Keys", "check_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What requests with a key get. Raises `InvalidConfig`."""

    #: Requests share cached prefixes with those of the same scope only.
    cache_scope: str = ""
    #: Requests at once at most; the next one is refused with 429. None: what the engine takes.
    max_requests: int | None = None
    #: Larger is more urgent, with `scheduler="priority"`.
    priority: int = 0

    def __post_init__(self) -> None:
        with checking_config():
            check_string("cache_scope", self.cache_scope, MAX_SCOPE_CHARS)
            check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
            if self.max_requests is not None:
                check_integer("max_requests", self.max_requests, 1)


def check_key(secret: object) -> None:
    """Raise `InvalidConfig`, which does not tell it, for a key that no header can have: the spaces
    around a header's value are no part of it."""
    if not isinstance(secret, str) or not secret:
        raise InvalidConfig("keys", type(secret).__name__, "a key must be a string")
    if not secret.isprintable() or secret != secret.strip():
        bound = "a key must have no control characters, and no white space around it"
        raise InvalidConfig("keys", Size(f"{len(secret)} characters"), bound)


class Keys:
    """Finds the key of a request, and counts the requests of each."""

    def __init__(self, keys: Mapping[str, ApiKey] | None, without: ApiKey) -> None:
        """`without`: the key of every request where there are no keys. Raises `InvalidConfig`."""
        self._without = nullcontext(without)
        #: By a hash of the key, so that the time of a look-up tells nothing about keys.
        self._known: dict[bytes, ApiKey] | None = None
        self._under_way: dict[bytes, int] = {}
        if keys is not None:
            if not isinstance(keys, Mapping):
                # Not told as it is: keys are secrets.
                raise InvalidConfig("keys", type(keys).__name__, "must map each key to an ApiKey")
            self._known = {}
            for secret, key in keys.items():
                check_key(secret)
                if not isinstance(key, ApiKey):
                    raise InvalidConfig("keys", type(key).__name__, "must map to an ApiKey")
                self._known[_digest(secret.encode())] = key

    def admit(self, headers: Mapping[bytes, bytes]) -> AbstractContextManager[ApiKey]:
        """Count a request with these headers for its key inside the block. Entering the block
        raises `HttpError`: 401 without a valid key, 429 where the key has as many running requests
        as it may."""
        return self._without if self._known is None else self._counted(self._known, headers)

    @contextmanager
    def _counted(
        self, known: Mapping[bytes, ApiKey], headers: Mapping[bytes, bytes]
    ) -> Iterator[ApiKey]:
        kind, _, secret = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            # Anthropic's clients send their key in a header of its own.
            secret = headers.get(b"x-api-key", b"")
        name = _digest(secret.strip())
        key = known.get(name)
        if key is None:
            raise HttpError(
                401,
                "authentication_error",
                "the request has no valid key: send `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        under_way = self._under_way.get(name, 0)
        if key.max_requests is not None and under_way >= key.max_requests:
            raise overloaded(f"this key has max_requests={key.max_requests} requests under way")
        self._under_way[name] = under_way + 1
        try:
            yield key
        finally:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
