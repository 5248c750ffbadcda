"""Every error asyncinfer raises, one tree.

    AsyncInferError
    ├── InvalidConfig (also ValueError)      an option of an engine, refused when it is made
    ├── InvalidRequest (also ValueError)     refused before any state exists
    │   └── PromptTooLong                    it fits neither this context nor this KV cache
    ├── Overloaded                           admission refused; try again later
    ├── RequestFailed                        this stream only
    │   ├── DeadlineExceeded (also TimeoutError)
    │   └── StreamStalled                    nobody read the stream for `stall_timeout`
    ├── StreamBusy (also RuntimeError)       the stream is used in a way it cannot be
    ├── EngineDead                           every stream, with the cause as `__cause__`
    ├── EngineClosed                         you closed the engine; it did not break
    ├── ModelLoadError                       names the file and the tensor
    └── PluginError                          names the plugin and its group

The ladder of severity: `InvalidRequest` -> `RequestFailed` -> `EngineDead`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "AsyncInferError",
    "DeadlineExceeded",
    "EngineClosed",
    "EngineDead",
    "InvalidConfig",
    "InvalidRequest",
    "ModelLoadError",
    "Overloaded",
    "PluginError",
    "PromptTooLong",
    "RequestFailed",
    "StreamBusy",
    "StreamStalled",
]


class AsyncInferError(Exception):
    """The root of all errors of this package."""


#: The most characters of a field's place.
_MOST_PLACE = 256


#: The most characters of a name in a checkpoint, and of what is said about it: the list of all
#: architectures has half of these.
_MOST_NAME = 400
_MOST_MESSAGE = 2000


class Size(str):
    """A description that an `InvalidRequest` shows in place of a value, such as
    `<30000 characters>`: without quotes."""

    def __repr__(self) -> str:
        return f"<{self}>"


class _Refusal(AsyncInferError, ValueError):
    """`field`, `value` and `bound` say what was wrong; the message carries all three."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        # A place contains names of the caller's choice, of any length.
        self.field = field if len(field) <= _MOST_PLACE else f"{field[: _MOST_PLACE - 3]}..."
        self.value = value
        self.bound = bound
        super().__init__(f"{self.field}={short_repr(value)}: {bound}")

    def __reduce__(self) -> tuple[type[_Refusal], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.bound)


class InvalidConfig(_Refusal):
    """An option of an engine has a bad value. It has `field`, `value` and `bound`."""


class InvalidRequest(_Refusal):
    """A request was refused before any state existed for it. It has `field`, `value` and
    `bound`."""


class PromptTooLong(InvalidRequest):
    """A prompt is longer than the model's context, or than the KV cache. A shorter one may do."""


class Overloaded(AsyncInferError):
    """The engine holds as many requests, or bytes of them, as it may, or has no thread for one
    more. Try again later."""


class RequestFailed(AsyncInferError):
    """One request failed; every other request goes on."""


class DeadlineExceeded(RequestFailed, TimeoutError):
    """The request's `deadline` passed before it was done."""


class StreamStalled(RequestFailed):
    """Nobody read the stream for `stall_timeout` seconds while its buffer was full."""


class StreamBusy(AsyncInferError, RuntimeError):
    """A second task reads a stream, a stream is used from another event loop than its own, or a
    session is used while its stream runs."""


class EngineDead(AsyncInferError):
    """The decode loop ended by a fault; `__cause__` holds it. Open a new engine to go on."""


class EngineClosed(AsyncInferError):
    """The engine was closed by its owner (or was never opened)."""


class ModelLoadError(AsyncInferError):
    """A checkpoint cannot be loaded. `file` and `tensor` are named where they are known. What it
    shows of a file that names things by megabytes is their beginning and end, on one line."""

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None) -> None:
        self.file = file
        self.tensor = tensor
        names = (("file", file), ("tensor", tensor))
        prefix = ", ".join(f"{kind} {_shown_name(name)}" for kind, name in names if name)
        message = _without_middle(message, _MOST_MESSAGE)
        super().__init__(f"{prefix}: {message}" if prefix else message)


class PluginError(AsyncInferError):
    """A plugin cannot be found, loaded or used; the message names it and its group."""


def _shown_name(name: str) -> str:
    name = _without_middle(name, _MOST_NAME)
    return name if name.isprintable() else repr(name)[1:-1]


def _without_middle(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


#: Formats only as much of a value as a message shows, since the value may be a prompt of megabytes.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 100
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = _REPR.maxfrozenset = 40


def short_repr(value: object, limit: int = 80) -> str:
    """A value as a message shows it, in at most `limit` characters; its own repr may raise."""
    if isinstance(value, str | bytes) and not isinstance(value, Size):
        value = value[:limit]
    try:
        text = _REPR.repr(value)
    except Exception:
        # An integer of too many digits, or an object whose repr raises.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def drop_frames(error: BaseException) -> None:
    """Replace each traceback by a note that says where the error was raised: a consumer may keep
    the error, and frames would keep the step and all in it."""
    chain = [error]
    for each in chain:
        raised = each.__traceback__
        while raised is not None and raised.tb_next is not None:
            raised = raised.tb_next
        if raised is not None:
            code = raised.tb_frame.f_code
            note = f"raised by {code.co_name}, {code.co_filename}:{raised.tb_lineno}"
            # A plugin may raise one object several times.
            if note not in getattr(each, "__notes__", ()):
                each.add_note(note)
        BaseException.with_traceback(each, None)
        others = [other for other in (each.__cause__, each.__context__) if other is not None]
        chain += [other for other in others if all(other is not known for known in chain)]


@contextmanager
def renaming(field: str, name: str) -> Iterator[None]:
    """Errors within that name `field`, or a place in it, name `name` instead."""
    try:
        yield
    except InvalidRequest as error:
        place = error.field.removeprefix(field)
        if place == error.field or place[:1] not in ("", "[", ".", "/"):
            raise
        # From Python 3.12 on, its frames refer to the one that calls this, which refers to it.
        error.__traceback__ = None
        raise type(error)(f"{name}{place}", error.value, error.bound) from None
