"""A vocabulary so small that random answers hold words, stop strings and characters of more bytes
than one."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from asyncinfer.testing.oracle import EOS_ID
from asyncinfer.testing.simulator.scenario import Ask
from asyncinfer.text import Tokenizer

__all__ = ["LETTERS", "VOCAB", "bytes_of", "prompt_of", "simulated_tokenizer", "text_of"]

LETTERS: Final = "abcdefgh "
#: What each token adds to a text, by id. Some are parts of a character only.
_BYTES: Final[tuple[bytes, ...]] = (
    b"",
    *(letter.encode() for letter in LETTERS),
    *(bytes([byte]) for byte in sorted(set("é€😀".encode()))),
    *(word.encode() for word in ("ab", "abc", "he", "the", " b", "é", "€")),
)
VOCAB: Final = len(_BYTES)


@cache
def simulated_tokenizer() -> Tokenizer:
    """Byte-level, without merges: a prompt of `LETTERS` is a token per character."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {"</s>": EOS_ID}
    for token_id, piece in enumerate(_BYTES[1:], 1):
        vocabulary["".join(_character(byte) for byte in piece)] = token_id
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = alphabet
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, eos_ids=[EOS_ID])


def bytes_of(token_id: int) -> bytes:
    """What a token adds to a text; some are parts of a character only."""
    return _BYTES[token_id]


def prompt_of(ask: Ask) -> Any:
    """The prompt as the consumer gives it to the engine: token ids, a text, or messages."""
    if ask.form == "ids":
        return ask.prompt
    text = simulated_tokenizer().decode(ask.prompt)
    return text if ask.form != "chat" else [{"role": "user", "content": text}]


def text_of(token_ids: Sequence[int], stops: Iterable[str] = ()) -> tuple[str, int | None]:
    """The text of an answer before the first of `stops`, and how many tokens it takes to know
    that; None if there is none. Written without the engine's own detokenizer."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for count, token_id in enumerate(token_ids, 1):
        text += decoder.decode(_BYTES[token_id])
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)], count
    return text + decoder.decode(b"", True), None


def _character(byte: int) -> str:
    """GPT-2's alphabet, as `tokenizers` has it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))
