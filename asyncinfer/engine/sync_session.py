"""`SyncSession`: a conversation for programs without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncinfer.chunk import Completion
from asyncinfer.engine.session import Session, SessionStream
from asyncinfer.engine.sync_stream import SyncStream
from asyncinfer.engine.uncopied import Uncopied

__all__ = ["SyncSession"]


class SyncSession(Uncopied):
    """A `Session` for programs without an event loop; the same names, arguments and errors."""

    def __init__(self, session: Session, blocking: Callable[[SessionStream], SyncStream]) -> None:
        """`blocking` makes a stream that blocks."""
        self._session = session
        self._blocking = blocking

    def __enter__(self) -> SyncSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The conversation so far."""
        return self._session.messages

    def append(self, *messages: str | Mapping[str, Any]) -> None:
        """As `Session.append`."""
        self._session.append(*messages)

    def stream(self, *messages: str | Mapping[str, Any], **options: Any) -> SyncStream:
        """As `Session.stream`."""
        return self._blocking(self._session.stream(*messages, **options))

    def send(self, *messages: str | Mapping[str, Any], **options: Any) -> Completion:
        """As `Session.send`."""
        return self.stream(*messages, **options).completion()

    def fork(self) -> SyncSession:
        """As `Session.fork`."""
        return SyncSession(self._session.fork(), self._blocking)

    def rewind(self, count: int) -> None:
        """As `Session.rewind`."""
        self._session.rewind(count)

    def close(self) -> None:
        """As `Session.close`."""
        self._session.close()
