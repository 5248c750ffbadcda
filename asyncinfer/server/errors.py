"""What a client is told of an error: status, body and headers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncinfer.errors import (
    DeadlineExceeded,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestFailed,
)

__all__ = ["FieldError", "HttpError", "anthropic_error", "http_error", "openai_error"]

#: Milliseconds after which a client that was refused for load may try again.
RETRY_MS: Final = 500


class HttpError(Exception):
    """A request that is answered with an error.

    Args:
        kind: OpenAI's and Anthropic's `type`, such as "invalid_request_error".
        param: the field that is wrong, if one is.
        code: OpenAI's `code`.
        headers: beside those of every answer.
        details: what Anthropic's clients read beside the message.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = details
        #: Whether it stands for an error that no rule of this module knows: a bug.
        self.foreign = False


class FieldError(InvalidRequest):
    """A field of a body is refused as the client has sent it. An option of the engine with the same
    name may be of another field."""


def http_error(
    error: Exception, names: Mapping[str, str] | None = None, places: Sequence[str] = ()
) -> HttpError:
    """The HTTP form of `error`. An error of another package is reported without its message.

    Args:
        names: engine options -> the request's names of them, where these differ.
        places: of each message that the engine was given, the field of the request that it was made
            of, in protocols whose requests have no messages.
    """
    match error:
        case HttpError():
            return error
        case InvalidRequest():
            own = isinstance(error, FieldError)
            param = error.field if own else _renamed(error.field, names or {}, places)
            message = param + str(error).removeprefix(error.field)
            code = _TOO_LONG if isinstance(error, PromptTooLong) else None
            return HttpError(400, "invalid_request_error", message, param=param, code=code)
        case Overloaded():
            return overloaded(str(error))
        case DeadlineExceeded():
            # The client's time is spent, so it decides whether to try again.
            return HttpError(504, "timeout_error", str(error), headers=_FINAL)
        case EngineClosed():
            return HttpError(503, "api_error", str(error), code="closed")
        case EngineDead():
            # Its message has a stack, and whatever the model's library or a plugin said.
            why = "the engine has died; the server's log says of what"
            return HttpError(500, "api_error", why, code="dead", headers=_FINAL)
        case RequestFailed():
            # What caused it is not the engine's to tell.
            why = "the request failed; the server's log says why" if error.__cause__ else str(error)
            return HttpError(500, "api_error", why, headers=_FINAL)
    unforeseen = HttpError(500, "api_error", "the server failed", headers=_FINAL)
    unforeseen.foreign = True
    return unforeseen


def overloaded(message: str) -> HttpError:
    headers = {"retry-after-ms": str(RETRY_MS), "retry-after": "1"}
    return HttpError(429, "rate_limit_error", message, code="overloaded", headers=headers)


def openai_error(error: HttpError, request_id: str) -> dict[str, Any]:
    """The body of an error, or the data of an event, for OpenAI's clients."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: HttpError, request_id: str) -> dict[str, Any]:
    """The body of an error, or the data of an event, for Anthropic's clients."""
    message = error.message
    if error.code == _TOO_LONG:
        # Anthropic's errors have no code: clients look for these words.
        message = f"prompt is too long: {message}"
    told: dict[str, Any] = {"type": error.kind, "message": message}
    if error.details is not None:
        told["details"] = error.details
    return {"type": "error", "error": told, "request_id": request_id}


#: The place of a message of the engine.
_MESSAGE: Final = re.compile(r"messages\[(\d{1,9})\]")
#: OpenAI's `code` of a prompt that does not fit the context: agents shorten it.
_TOO_LONG: Final = "context_length_exceeded"
#: Official clients try again after a 5xx unless they are told not to.
_FINAL: Final = {"x-should-retry": "false"}


def _renamed(field: str, names: Mapping[str, str], places: Sequence[str]) -> str:
    found = _MESSAGE.match(field)
    if found is not None and int(found[1]) < len(places):
        place = places[int(found[1])]
        # A field that is a plain text has no parts.
        return place + field[found.end() :] if place.endswith("]") else place
    for name, given in names.items():
        # A field may name a place within an option, such as `prompt[3]`.
        if field == name or field.startswith((f"{name}[", f"{name}.", f"{name}/")):
            return given + field[len(name) :]
    return field
