"""`OutputStream`: from the tokens of one answer to chunks in the stream's buffer."""

from __future__ import annotations

from collections import abc
from typing import TypeAlias

from asyncinfer.engine.loop_bridge import Packed
from asyncinfer.engine.repetition import LoopDetector
from asyncinfer.engine.request import Request, TokenSink
from asyncinfer.errors import RequestFailed
from asyncinfer.scheduler import RowLogprobs, Sequence
from asyncinfer.text import TextStop
from asyncinfer.tools import Detokenizes

__all__ = ["OutputStream"]

#: Text, why the answer ends, if it does, and what ends it: see `Choice.stop_reason`.
_Read: TypeAlias = tuple[str, str | None, str | int | None]


class OutputStream(TokenSink):
    """One answer as text: finds stop strings and loops, and puts chunks into the buffer."""

    __slots__ = ("detokenizer", "loops", "plain", "stops", "unsent")

    def __init__(
        self,
        request: Request,
        index: int,
        sequence: Sequence,
        detok: Detokenizes,
        stops: TextStop | None = None,
        loops: LoopDetector | None = None,
    ) -> None:
        super().__init__(request, sequence, index)
        self.detokenizer = detok
        self.stops = stops
        self.loops = loops
        interval = request.options.stream_interval
        #: Whether each token is sent at once, with no stop strings or loops to look for.
        self.plain = stops is None and loops is None and interval == 1
        #: Tokens that wait for the rest of their chunk; None where each step makes a chunk.
        self.unsent: _Unsent | None = None if interval == 1 else _Unsent(interval)

    def advance(
        self, tokens: tuple[int, ...], reason: str | None, logprobs: Packed = ()
    ) -> str | None:
        """Hand `tokens` on to the consumer; `reason` says why the answer ends with them, if it
        does.

        Returns the reason the answer ends: "stop" where its grammar is complete, and where a
        stop string was found; "repetition" where it repeats itself. The text of a stop token is
        never shown, nor is any text after it or after a stop string.

        Raises `RequestFailed` where its `stop_regex` takes too much work.
        """
        count = len(tokens)
        if reason is None and count == 1 and self.plain:
            # The path of nearly every token.
            self.count += 1
            text = self.detokenizer.push(tokens[0])
            request = self.request
            request.delivered += 1
            request.buffer.put((text, tokens, logprobs, self.index, None, None))
            return None
        if not tokens or (self.stops is None and self.loops is None):
            # A count of 0: the answer ends before its first token.
            self.count += count
            text, reason, stop = self._read(tokens, reason)
        else:
            before = self.count
            text, reason, stop = self._read_each(tokens, reason)
            if self.count < before + count:
                # The answer ended before the last of them.
                count = self.count - before
                tokens, logprobs = tokens[:count], logprobs[:count] if logprobs else ()
        if self.unsent is None:
            self._put(text, tokens, logprobs, reason, stop)
        elif self.unsent.add(text, tokens, logprobs) or reason is not None:
            self._put(*self.unsent.take(), reason, stop)
        return reason

    def finish(self, reason: str) -> None:
        """End the answer between two tokens, showing the text that was held back."""
        text = self.detokenizer.flush()
        if self.stops is not None:
            text, found = self.stops.push(text, self.count >= self.request.params.min_tokens)
            if found is None:
                text += self.stops.flush()
        self._put_last(text, reason)

    def show_held(self) -> None:
        """Show what was held back as the possible beginning of a stop string, or for the rest of
        its chunk, before an end by an error. An unfinished character is not shown."""
        try:
            text = "" if self.stops is None else self.stops.flush()
        except RequestFailed:
            # `stop_regex` may be the cause of this end.
            text = ""
        if text or (self.unsent is not None and self.unsent.tokens):
            self._put_last(text, None)

    def _put_last(self, text: str, reason: str | None) -> None:
        """Put what is left of the answer, with this text at its end."""
        if self.unsent is None:
            self._put(text, (), (), reason)
        else:
            self.unsent.add(text, (), ())
            self._put(*self.unsent.take(), reason)

    def _put(
        self,
        text: str,
        tokens: tuple[int, ...],
        logprobs: Packed,
        reason: str | None,
        stop: str | int | None = None,
    ) -> None:
        request = self.request
        request.delivered += len(tokens)
        request.buffer.put((text, tokens, logprobs, self.index, reason, stop))

    def _read_each(self, tokens: abc.Sequence[int], reason: str | None) -> _Read:
        """`_read`, one token after the other, up to the first that ends the answer."""
        text, last = "", len(tokens) - 1
        for index, token in enumerate(tokens):
            self.count += 1
            more, ended, stop = self._read((token,), reason if index == last else None)
            text += more
            if ended is not None:
                return text, ended, stop
        return text, None, None

    def _read(self, tokens: abc.Sequence[int], reason: str | None) -> _Read:
        """The text that `tokens` settle, why the answer ends, if it does, and what ends it."""
        shown, stop = tokens, None
        if reason == "stop":
            shown = tokens[:-1]
            stop = self.request.stop_reason(tokens[-1])
        elif reason == "complete":
            reason = "stop"
        if self.loops is not None and any(map(self.loops.push, tokens)):
            reason = reason or "repetition"
        text = "".join(map(self.detokenizer.push, shown))
        if reason is not None:
            text += self.detokenizer.flush()
        if self.stops is not None:
            text, found = self.stops.push(text, self.count >= self.request.params.min_tokens)
            if found is not None:
                message = self.request.message
                stop = found if message is None else message.delimiters.unmarked(found)
                return text, "stop", stop
            if reason is not None:
                text += self.stops.flush()
        return text, reason, stop


class _Unsent:
    """Tokens and text drawn since the last chunk, where `stream_interval` is above 1."""

    __slots__ = ("_interval", "_logprobs", "_sent", "_texts", "tokens")

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._sent = False
        self._texts: list[str] = []
        self.tokens: list[int] = []
        self._logprobs: list[RowLogprobs] = []

    def add(self, text: str, tokens: abc.Sequence[int], logprobs: Packed) -> bool:
        """Returns whether a chunk is due. The first token is due at once: somebody waits for it."""
        self._texts.append(text)
        self.tokens.extend(tokens)
        if isinstance(logprobs, RowLogprobs):
            self._logprobs.append(logprobs)
        return len(self.tokens) >= self._interval or not self._sent

    def take(self) -> tuple[str, tuple[int, ...], Packed]:
        """Take all of it out."""
        logprobs: Packed = RowLogprobs.join(self._logprobs) if self._logprobs else ()
        taken = "".join(self._texts), tuple(self.tokens), logprobs
        self._sent = True
        self._texts, self.tokens, self._logprobs = [], [], []
        return taken
