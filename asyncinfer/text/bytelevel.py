"""GPT-2's alphabet: each byte as one printable character, so that a vocabulary is text."""

from __future__ import annotations

from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

__all__ = ["BYTE_TO_CHAR", "CHAR_TO_BYTE", "byte_level_backend"]


def _alphabet() -> dict[int, str]:
    """Each byte's character (Radford et al., 2019): printable bytes stand for themselves, the
    others are moved past 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


BYTE_TO_CHAR: Final = _alphabet()
CHAR_TO_BYTE: Final = {char: byte for byte, char in BYTE_TO_CHAR.items()}


def byte_level_backend(*, add_bos: bool) -> tokenizers.Tokenizer:
    """A tokenizer whose token `b` is the byte `b`; 256 is `<s>` and 257 is `</s>`."""
    vocabulary = {BYTE_TO_CHAR[byte]: byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 256)]
        )
    return backend
