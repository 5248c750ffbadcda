"""From a `Tokenizer` to the grammar library's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncinfer.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["grammar_tokenizer", "spelled_chars"]


def grammar_tokenizer(
    tokenizer: Tokenizer, vocab_size: int, marked: frozenset[int] = frozenset()
) -> tuple[LLTokenizer, frozenset[int]]:
    """The library's tokenizer for logits of `vocab_size` entries, and the bytes that are in none of
    its tokens. The tokens `marked` are no text, as special ones.

    Making it keeps the GIL: 25 ms for a vocabulary of 4,096, 50 ms for 49,152, half a second for
    250,000. The library would read `tokenizer.json` by itself in three times as long. So it is
    given each token's bytes, and asks our tokenizer for the tokens of text that has to follow.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    eos = sorted(token for token in tokenizer.eos_ids if token < vocab_size)
    known = min(vocab_size, tokenizer.vocab_size)
    pieces = [tokenizer.token_bytes(token) for token in range(known)]
    slices = LLTokenizer.general_slices()
    if None in pieces:
        # The bytes of some tokens depend on their neighbours, which the library has rules for.
        return LLTokenizer(tokenizer.to_json(), vocab_size, eos, slices), frozenset()
    # Special tokens get names instead of bytes, each its own, since the library drops all but one
    # of equal tokens. Such names begin with the byte 0xff, which no text has, so a token that holds
    # that byte gets no bytes either.
    special = {i for i in marked.union(eos, tokenizer.special_ids) if i < known}
    tokens = [b"" if b"\xff" in (piece or b"") else piece or b"" for piece in pieces]
    tokens += [b""] * (vocab_size - known)
    for token in special:
        tokens[token] = b""
    missing = frozenset(range(256)).difference(b"".join(tokens))
    for token in special:
        tokens[token] = b"<%d>" % token
    wrapped = TokenizerWrapper(_Pieces(tokenizer, tokens, eos[0], sorted(special)))
    return LLTokenizer(wrapped, vocab_size, eos, slices), missing


def spelled_chars(missing: frozenset[int]) -> str:
    """A regular expression's class of the characters whose first byte is not missing; empty where
    that is true of all."""
    ranges = []
    for byte in sorted(missing):
        if byte < 0x80:
            ranges.append(f"\\x{{{byte:x}}}")
        elif 0xC2 <= byte <= 0xF4:
            # It holds the highest bits of a character, and each byte that follows six more.
            bits = 6 if byte < 0xE0 else 12 if byte < 0xF0 else 18
            low = (byte & 0x3F >> bits // 6) << bits
            high = 0xD7FF if byte == 0xED else min(low + (1 << bits) - 1, 0x10FFFF)
            low = max(low, {12: 0x800, 18: 0x10000}.get(bits, 0))
            ranges.append(f"\\x{{{low:x}}}-\\x{{{high:x}}}")
    return f"[^{''.join(ranges)}]" if ranges else ""


class _Pieces:
    """What the library asks of a tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, tokens: list[bytes], eos: int, special: list[int]
    ) -> None:
        self.tokens = tokens
        self.eos_token_id = eos
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = special
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_inner(text)
