"""`Detokenizer`: the text of one sequence, token by token, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from asyncinfer.bounds import MAX_TOKENS
from asyncinfer.errors import InvalidRequest
from asyncinfer.text.decode_window import ByteRuns, DecodeWindow
from asyncinfer.text.pieces import PieceTable

__all__ = ["Detokenizer"]

_BAD: Final = "\N{REPLACEMENT CHARACTER}"
_NEW_UTF8 = codecs.getincrementaldecoder("utf-8")


class HasPieces(Protocol):
    """What a `Detokenizer` needs of a tokenizer."""

    @property
    def pieces(self) -> PieceTable: ...


class Detokenizer:
    """Decodes one sequence. The deltas of `push` and `flush` together are
    `tokenizer.decode(ids)`; special tokens add nothing."""

    __slots__ = ("_rest", "_settled", "_texts")

    def __init__(self, tokenizer: HasPieces, after: Sequence[int] = ()) -> None:
        """`after` are the tokens of the prompt. Many decoders strip the space at the start of a
        text, so an answer that continues a prompt's text must keep it. After a special token a new
        text starts."""
        pieces = tokenizer.pieces
        tail = pieces.tail(after)
        self._texts = pieces.texts
        self._rest: _Rest
        match pieces.kind.name:
            case "byte_level":
                self._rest = _Utf8(pieces)
            case "sentencepiece":
                self._rest = _SentencePiece(pieces, 0 if tail else pieces.kind.strip)
            case _:
                window = DecodeWindow(pieces, tail)
                self._rest = ByteRuns(pieces, window) if pieces.kind.byte_fallback else window
        #: Whether nothing is held back, so that a token adds just its own text.
        self._settled = self._rest.settled

    def push(self, token_id: int) -> str:
        """What the token adds to the text; bytes that begin a character wait for its end. Raises
        `InvalidRequest` for what cannot be a token id."""
        # A negative id is no token, but would be an index from the end.
        if self._settled and 0 <= token_id < len(self._texts):
            text = self._texts[token_id]
            if text is not None:
                return text
        if not 0 <= token_id <= MAX_TOKENS:
            raise InvalidRequest("token_id", token_id, f"must be between 0 and {MAX_TOKENS}")
        text = self._rest.push(token_id)
        self._settled = self._rest.settled
        return text

    def flush(self) -> str:
        """What is still held back, as the end of the text."""
        text = self._rest.flush()
        self._settled = self._rest.settled
        return text

    def decode(self, ids: Iterable[int]) -> str:
        """The whole text of `ids`, from a fresh start to the end."""
        return "".join([self.push(token_id) for token_id in ids]) + self.flush()


class _Rest(Protocol):
    """Decodes the tokens that the table of whole tokens does not cover."""

    settled: bool

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _Utf8:
    """Tokens are bytes. A malformed sequence becomes one U+FFFD (the maximal subpart, Unicode
    chapter 3.9), in Python's decoder and in the library's alike."""

    __slots__ = ("_decoder", "_pieces", "settled")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._decoder = _NEW_UTF8("replace")
        self.settled = True

    def push(self, token_id: int) -> str:
        if token_id in self._pieces.special_ids:
            return ""
        data = self._pieces.bytes_of(token_id) or b""
        if self.settled and _remember(self._pieces, token_id, data):
            return data.decode()
        text = self._decoder.decode(data)
        self.settled = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self.settled = True
        return self._decoder.decode(b"", True)


class _SentencePiece:
    """Tokens are text, or one byte of a run of bytes. If a run is malformed, the library writes one
    U+FFFD for each of its bytes; so does this, except for characters that were shown already."""

    __slots__ = ("_broken", "_decoder", "_held", "_pieces", "_strip", "settled")

    def __init__(self, pieces: PieceTable, strip: int) -> None:
        self._pieces = pieces
        self._decoder = _NEW_UTF8("strict")
        #: Bytes of an unfinished character.
        self._held = 0
        #: Whether the run of bytes is malformed, and so the rest of the run.
        self._broken = False
        #: Spaces still to be stripped from the start of the text.
        self._strip = strip
        self.settled = not self._strip

    def push(self, token_id: int) -> str:
        data = self._pieces.bytes_of(token_id)
        if not data or token_id in self._pieces.special_ids:
            # The decoder skips this token, so a run of bytes goes on after it.
            return ""
        if self._pieces.byte_of(token_id) is not None:
            text = self._byte(data)
        else:
            text = self._end_run() + data.decode()
            _remember(self._pieces, token_id, data)
        return self._settle(text)

    def flush(self) -> str:
        return self._settle(self._end_run())

    def _byte(self, data: bytes) -> str:
        if self._broken:
            return _BAD
        self._held += 1
        try:
            text = self._decoder.decode(data)
        except UnicodeDecodeError:
            text = self._end_run()
            self._broken = True
        if text:
            self._held = 0
        return text

    def _end_run(self) -> str:
        text = _BAD * self._held
        self._held = 0
        self._broken = False
        self._decoder.reset()
        return text

    def _settle(self, text: str) -> str:
        if self._strip and text:
            bare = text.lstrip(" ")
            cut = min(self._strip, len(text) - len(bare))
            # Any other character ends the stripping.
            self._strip = self._strip - cut if cut == len(text) else 0
            text = text[cut:]
        self.settled = not (self._held or self._broken or self._strip)
        return text


def _remember(pieces: PieceTable, token_id: int, data: bytes) -> bool:
    """Fill the table's entry if the token's bytes are whole characters; returns whether they
    are."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    if token_id < len(pieces.texts):
        pieces.texts[token_id] = text
    return True
