"""`Coalescing`: chunks of a stream that waits for no reader."""

from __future__ import annotations

from collections import deque
from io import StringIO
from typing import TYPE_CHECKING

from asyncinfer.scheduler import RowLogprobs

if TYPE_CHECKING:
    from asyncinfer.engine.stream_buffer import Content

__all__ = ["Coalescing"]


class Coalescing:
    """A queue that holds at most `most` chunks one by one, and merges the others into one chunk
    for each answer. Adding a chunk costs the same however many tokens wait.

    The reader has the queue, so no token is lost whichever thread ends the stream.
    """

    __slots__ = ("_late", "_most", "_single")

    def __init__(self, most: int) -> None:
        self._most = most
        self._single: deque[Content] = deque()
        #: By answer, the chunk that those after the single ones are merged into.
        self._late: dict[int, _Late] = {}

    def __len__(self) -> int:
        return len(self._single) + len(self._late)

    def append(self, content: Content) -> None:
        if not self._late and len(self._single) < self._most:
            self._single.append(content)
        else:
            index = content[3]
            late = self._late.get(index)
            if late is None:
                late = self._late[index] = _Late(index)
            late.add(content)

    def popleft(self) -> Content:
        """The next chunk; `IndexError` if there is none."""
        if self._single or not self._late:
            return self._single.popleft()
        return self._late.pop(next(iter(self._late))).content()


class _Late:
    """A chunk that grows."""

    __slots__ = ("_index", "_logprobs", "_reason", "_text", "_tokens")

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = StringIO(newline="")
        self._tokens: list[int] = []
        self._logprobs: list[RowLogprobs] = []
        self._reason: str | None = None

    def add(self, content: Content) -> None:
        text, tokens, logprobs, _, self._reason = content
        self._text.write(text)
        self._tokens += tokens
        if logprobs:
            self._logprobs.append(logprobs)

    def content(self) -> Content:
        logprobs = RowLogprobs.join(self._logprobs) if self._logprobs else ()
        return self._text.getvalue(), tuple(self._tokens), logprobs, self._index, self._reason
