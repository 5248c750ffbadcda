"""`OutputStream`: from the tokens of one answer to chunks in the stream's buffer."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

from asyncinfer.engine.stream_buffer import Packed
from asyncinfer.scheduler import Sequence
from asyncinfer.text import Detokenizer, StopStrings

if TYPE_CHECKING:
    from asyncinfer.engine.job import Job

__all__ = ["OutputStream"]


class OutputStream:
    """One of the `n` answers: detokenises, finds stop strings, and puts chunks into the buffer.
    `request.owner` is this."""

    __slots__ = (
        "count",
        "detokenizer",
        "ended",
        "index",
        "job",
        "reason",
        "request",
        "stops",
    )

    def __init__(
        self, job: Job, index: int, request: Sequence, detok: Detokenizer, stops: StopStrings | None
    ) -> None:
        self.job = job
        self.index = index
        self.request = request
        self.detokenizer = detok
        self.stops = stops
        self.ended = False
        #: Why the answer is complete; None before, and where it never becomes so.
        self.reason: str | None = None
        #: Tokens drawn.
        self.count = 0

    def advance(
        self, tokens: abc.Sequence[int], reason: str | None, logprobs: Packed = ()
    ) -> str | None:
        """Hand `tokens` on to the consumer; `reason` says why the answer ends with them, if it
        does.

        Returns the reason the answer ends: "stop" where a stop string was found. The text of a stop
        token or stop string is never shown, nor is any text after it.
        """
        self.count += len(tokens)
        if reason is None and self.stops is None and len(tokens) == 1:
            # Nearly every token there is.
            text = self.detokenizer.push(tokens[0])
        else:
            text, reason = self._read(tokens, reason)
        self._put(text, tokens, logprobs, reason)
        return reason

    def finish(self, reason: str) -> None:
        """End the answer between two tokens, showing the text that was held back."""
        text = self.detokenizer.flush()
        if self.stops is not None:
            text, found = self.stops.push(text, self.count >= self.job.params.min_tokens)
            if not found:
                text += self.stops.flush()
        self._put(text, (), (), reason)

    def show_held(self) -> None:
        """Show the text that was held back as the possible beginning of a stop string, before an
        end by an error. An unfinished character stays away, for nobody knows which it is."""
        if self.stops is not None and (text := self.stops.flush()):
            self._put(text, (), (), None)

    def _read(self, tokens: abc.Sequence[int], reason: str | None) -> tuple[str, str | None]:
        """The text that `tokens` settle, and why the answer ends, if it does."""
        shown = tokens[:-1] if reason == "stop" else tokens
        text = "".join(map(self.detokenizer.push, shown))
        if reason is not None:
            text += self.detokenizer.flush()
        if self.stops is not None:
            text, found = self.stops.push(text, self.count >= self.job.params.min_tokens)
            if found:
                reason = "stop"
            elif reason is not None:
                text += self.stops.flush()
        return text, reason

    def _put(
        self, text: str, tokens: abc.Sequence[int], logprobs: Packed, reason: str | None
    ) -> None:
        job = self.job
        job.delivered += len(tokens)
        job.buffer.put((text, tuple(tokens), logprobs, self.index, reason))
