"""`PieceTable`: the text that each token adds, for decoders where that depends on the token
alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import tokenizers

from asyncinfer.text.bytelevel import CHAR_TO_BYTE
from asyncinfer.text.panic import panicked

__all__ = ["DecoderKind", "PieceTable", "decoder_kind"]

#: A token for a byte. A sign is allowed, since the library parses the number by Rust's rules.
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
#: The text after a prompt depends on at most so many of its last tokens.
_TAIL: Final = 8


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """How a tokenizer's decoder joins tokens."""

    #: "byte_level": a token is bytes (GPT-2, Llama 3, Qwen). "sentencepiece": a token is text with
    #: `▁` for a space, or one byte written `<0x0A>` (Llama 2, Mistral, Gemma). "other": only the
    #: decoder itself can tell.
    name: Literal["byte_level", "sentencepiece", "other"]
    #: Spaces that the decoder strips from the start of a text.
    strip: int = 0
    #: Whether tokens like `<0x0A>` are bytes.
    byte_fallback: bool = False


def decoder_kind(backend: tokenizers.Tokenizer) -> DecoderKind:
    """Recognise the decoder of a tokenizer."""
    if backend.decoder is None:
        return DecoderKind("other")
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    names = [step["type"] for step in steps]
    # Tried out, since a decoder before ByteFallback may change such tokens.
    fallback = "ByteFallback" in names and "é" in backend.decoder.decode(["<0xC3>", "<0xA9>"])
    if names == ["ByteLevel"]:
        return DecoderKind("byte_level")
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if names[:3] != ["Replace", "ByteFallback", "Fuse"] or steps[0] != space:
        return DecoderKind("other", byte_fallback=fallback)
    match steps[3:]:
        case []:
            return DecoderKind("sentencepiece", byte_fallback=True)
        case [{"type": "Strip", "content": " ", "start": int(start), "stop": 0}]:
            return DecoderKind("sentencepiece", strip=start, byte_fallback=True)
    return DecoderKind("other", byte_fallback=fallback)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


class PieceTable:
    """The text and bytes of each token, looked up once. Shared by all sequences and threads: two
    that fill the same entry write the same value."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        kind: DecoderKind,
        size: int,
        special_ids: frozenset[int],
    ) -> None:
        self.backend = backend
        self.kind = kind
        self.special_ids = special_ids
        #: By token id: the text that the token adds next to any neighbour; None if it is only a
        #: part of a character, depends on its neighbours, or was not decoded yet.
        self.texts: list[str | None] = [None] * size
        for token_id in special_ids:
            self.texts[token_id] = ""
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes | None:
        """Bytes of the token; None if the decoder does not work token by token."""
        if self.kind.name == "other":
            return None
        data = self._bytes.get(token_id)
        if data is None:
            token = self.backend.id_to_token(token_id)
            if token is None:
                return b""
            data = self._bytes[token_id] = self._look_up(token)
        return data

    def _look_up(self, token: str) -> bytes:
        if self.kind.name == "byte_level":
            try:
                return bytes([CHAR_TO_BYTE[char] for char in token])
            except KeyError:
                # An added token stands for itself, as in the library's decoder.
                return token.encode("utf-8")
        byte = _byte(token)
        return token.replace("▁", " ").encode("utf-8") if byte is None else byte

    def byte_of(self, token_id: int) -> bytes | None:
        """The byte of a token written like `<0x0A>`."""
        token = self.backend.id_to_token(token_id)
        return None if token is None else _byte(token)

    def adds(self, token_id: int) -> bool:
        """Whether the decoder sees the token: it exists and is not special."""
        return token_id not in self.special_ids and self.backend.id_to_token(token_id) is not None

    def tail(self, ids: Sequence[int]) -> list[int]:
        """The last few of `ids` after the last special token, without ids that have no token."""
        tail: list[int] = []
        for token_id in reversed(ids[-_TAIL:]):
            if token_id in self.special_ids:
                break
            if self.adds(token_id):
                tail.insert(0, token_id)
        return tail

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The library's own answer; U+FFFD for each token that its decoder fails for."""
        if not ids:
            # Some decoders fail for an empty list.
            return ""
        try:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not panicked(error):
                raise
        if len(ids) == 1:
            return "\N{REPLACEMENT CHARACTER}"
        return "".join(self.decode([token_id], skip_special_tokens) for token_id in ids)


def _byte(token: str) -> bytes | None:
    byte = _BYTE_TOKEN.fullmatch(token)
    return None if byte is None else bytes([int(byte[1], 16)])
