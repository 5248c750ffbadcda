"""`DecodeWindow`: streaming for decoders that need context, by decoding the last few tokens
again."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from itertools import chain
from typing import Final

from asyncinfer.text.pieces import PieceTable

__all__ = ["ByteRuns", "DecodeWindow"]

_BAD: Final = "\N{REPLACEMENT CHARACTER}"
#: A character has at most four bytes: no more than three of them can be waiting.
_UNFINISHED: Final = 3


class DecodeWindow:
    """Gives the new part of the text of the last few tokens.

    Exact for decoders that only append text and look back a token or two (WordPiece, Metaspace, BPE
    with `</w>`, CTC). If a decoder changes text that was shown, the stream goes on with the text
    after the part that stayed: shown text is never taken back, and no text is held up.
    """

    __slots__ = ("_pieces", "_shown", "_units", "settled")

    #: Units decoded again at most, and kept when the window is cut.
    _LONGEST, _KEPT = 24, 8

    def __init__(self, pieces: PieceTable, before: Iterable[int] = ()) -> None:
        """`before` are tokens whose text was shown already."""
        self._pieces = pieces
        #: Each unit is one token, or the tokens of the bytes of one character.
        self._units = [[token_id] for token_id in before]
        #: The part of the window's text that was given.
        self._shown = self._decode(self._units)
        #: Always False, since every token depends on those before it.
        self.settled = False

    def push(self, token_id: int) -> str:
        return self.add([token_id]) if self._pieces.adds(token_id) else ""

    def add(self, unit: list[int]) -> str:
        """The text that the tokens of a unit add; none of them is special."""
        self._units.append(unit)
        delta = self._give(_finished(self._decode(self._units)))
        if len(self._units) > self._LONGEST:
            self._cut()
        return delta

    def flush(self) -> str:
        return self._give(self._decode(self._units))

    def restart(self, unit: list[int]) -> None:
        """Go on after a unit that was shown, without the units before it."""
        self._units = [unit]
        self._shown = self._decode(self._units)

    def _give(self, text: str) -> str:
        shown = self._shown
        if shown.startswith(text):
            # Nothing is new, or the decoder removed text that may come back.
            return ""
        self._shown = text
        return text[len(shown) if text.startswith(shown) else _same(shown, text) :]

    def _cut(self) -> None:
        """Drop old units, whose text was given; only an unfinished character at the end was not."""
        units = self._units
        kept = units[-self._KEPT :]
        text = _finished(self._decode(kept))
        if not text:
            # Keep one unit with text, so that the next token is not decoded as the first of a text.
            for unit in reversed(units[: -self._KEPT]):
                if self._decode([unit]):
                    kept = [unit, *kept]
                    text = _finished(self._decode(kept))
                    break
        self._units, self._shown = kept, text

    def _decode(self, units: list[list[int]]) -> str:
        return self._pieces.decode(list(chain.from_iterable(units)))


class ByteRuns:
    """A window for decoders with tokens like `<0x0A>`. If a run of bytes is malformed, the library
    writes U+FFFD for each of its bytes, even for characters that were shown by then. Here shown
    characters stay, and only bytes that make no character become U+FFFD."""

    __slots__ = ("_broken", "_decoder", "_held", "_pieces", "_window", "settled")

    def __init__(self, pieces: PieceTable, window: DecodeWindow) -> None:
        self._pieces = pieces
        self._window = window
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        #: Bytes of an unfinished character.
        self._held: list[int] = []
        #: Whether the run of bytes is malformed, and so the rest of the run.
        self._broken = False
        self.settled = False

    def push(self, token_id: int) -> str:
        if not self._pieces.adds(token_id):
            # The decoder skips this token, so a run of bytes goes on after it.
            return ""
        byte = self._pieces.byte_of(token_id)
        if byte is None:
            return self._end_run() + self._window.add([token_id])
        return _BAD if self._broken else self._byte(token_id, byte)

    def flush(self) -> str:
        return self._end_run() + self._window.flush()

    def _byte(self, token_id: int, byte: bytes) -> str:
        self._held.append(token_id)
        try:
            if not self._decoder.decode(byte):
                return ""
        except UnicodeDecodeError:
            text = self._end_run()
            self._broken = True
            return text
        unit, self._held = self._held, []
        return self._window.add(unit)

    def _end_run(self) -> str:
        held, self._held = self._held, []
        self._broken = False
        self._decoder.reset()
        if not held:
            return ""
        text = self._window.flush() + _BAD * len(held)
        self._window.restart(held[-1:])
        return text


def _finished(text: str) -> str:
    """`text` without an end that may be the beginning of a character."""
    return text[: max(len(text.rstrip(_BAD)), len(text) - _UNFINISHED)]


def _same(first: str, second: str) -> int:
    """The length of the common beginning of two texts, of which neither begins with the other."""
    return next(at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
