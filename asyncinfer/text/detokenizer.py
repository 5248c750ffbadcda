"""`Detokenizer`: the text of one sequence, token by token, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Final, Protocol

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

    def __init__(self, tokenizer: HasPieces) -> None:
        pieces = tokenizer.pieces
        self._texts = pieces.texts
        self._rest: _Rest
        match pieces.kind.name:
            case "byte_level":
                self._rest = _Utf8(pieces)
            case "sentencepiece":
                self._rest = _SentencePiece(pieces)
            case _:
                self._rest = _Window(pieces)
        #: Nothing is held back, so that a token's own text is all it adds.
        self._settled = self._rest.settled

    def push(self, token_id: int) -> str:
        """What the token adds to the text; bytes that begin a character wait for its end."""
        if self._settled and token_id < len(self._texts):
            text = self._texts[token_id]
            if text is not None:
                return text
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
    """What the table of whole tokens does not cover."""

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
    """Tokens are text, or one byte of a run of bytes. Where a run is malformed, the library puts
    one U+FFFD for each of its bytes; so do we, but for the characters that were shown already."""

    __slots__ = ("_broken", "_decoder", "_held", "_pieces", "_strip", "settled")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._decoder = _NEW_UTF8("strict")
        #: Bytes of an unfinished character.
        self._held = 0
        #: The run of bytes is malformed: what follows in it is too.
        self._broken = False
        #: Spaces still to be taken off the start of the text.
        self._strip = pieces.kind.strip
        self.settled = not self._strip

    def push(self, token_id: int) -> str:
        data = self._pieces.bytes_of(token_id)
        if not data or token_id in self._pieces.special_ids:
            # Not there for the decoder: a run of bytes goes on after it.
            return ""
        if self._pieces.is_byte(token_id):
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


class _Window:
    """Any other decoder: decode the last few tokens again and give what is new. Exact for
    decoders whose text only grows and looks back a token or two (WordPiece, Metaspace, BPE
    with `</w>`); text that was shown is never taken back."""

    __slots__ = ("_ids", "_pieces", "_shown", "settled")

    #: Tokens decoded again at most, and kept when the window is cut.
    _LONGEST, _KEPT = 24, 8
    #: A character has at most four bytes: no more than three of them can be waiting.
    _UNFINISHED = 3

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._ids: list[int] = []
        #: What of the window's text was given.
        self._shown = ""
        #: Never: every token depends on those before it.
        self.settled = False

    def push(self, token_id: int) -> str:
        if token_id in self._pieces.special_ids:
            return ""
        self._ids.append(token_id)
        text = self._pieces.decode(self._ids)
        whole = text.rstrip(_BAD)
        return self._give(text[: max(len(whole), len(text) - self._UNFINISHED)])

    def flush(self) -> str:
        return self._give(self._pieces.decode(self._ids))

    def _give(self, text: str) -> str:
        if len(text) <= len(self._shown) or not text.startswith(self._shown):
            return ""
        delta = text[len(self._shown) :]
        self._shown = text
        if len(self._ids) > self._LONGEST:
            self._cut()
        return delta

    def _cut(self) -> None:
        kept = self._ids[-self._KEPT :]
        text = self._pieces.decode(kept)
        # A window without text would make the next token the first of a text.
        if text and self._shown.endswith(text):
            self._ids, self._shown = kept, text


def _remember(pieces: PieceTable, token_id: int, data: bytes) -> bool:
    """Fill the table's entry if the token is whole by itself."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    if token_id < len(pieces.texts):
        pieces.texts[token_id] = text
    return True
