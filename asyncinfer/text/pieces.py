"""What one token adds to a text, for the decoders where that does not depend on its neighbours."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

import tokenizers

from asyncinfer.text.bytelevel import bytes_of_token

__all__ = ["DecoderKind", "PieceTable", "decoder_kind"]

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """How a tokenizer's decoder joins tokens."""

    #: "byte_level": a token is bytes (GPT-2, Llama 3, Qwen). "sentencepiece": a token is text with
    #: `▁` for a space, or one byte written `<0x0A>` (Llama 2, Mistral, Gemma). "other": ask it.
    name: Literal["byte_level", "sentencepiece", "other"]
    #: Spaces the decoder takes off the start of the text.
    strip: int = 0
    #: Whether tokens like `<0x0A>` are bytes.
    byte_fallback: bool = False


def decoder_kind(backend: tokenizers.Tokenizer) -> DecoderKind:
    """Recognise the decoder of a tokenizer."""
    if backend.decoder is None:
        return DecoderKind("other")
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    names = [step["type"] for step in steps]
    fallback = "ByteFallback" in names
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
        #: By token id: what the token adds to a text, whatever its neighbours; None where it is
        #: only part of a character, depends on its neighbours, or was not asked for yet.
        self.texts: list[str | None] = [None] * size
        for token_id in special_ids:
            self.texts[token_id] = ""
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes | None:
        """Bytes of the token; None if the decoder is not one that works token by token."""
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
            return bytes_of_token(token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode("utf-8")

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte written like `<0x0A>`."""
        token = self.backend.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def decode(self, ids: list[int]) -> str:
        """The library's own answer, special tokens skipped."""
        return self.backend.decode(ids, skip_special_tokens=True)
