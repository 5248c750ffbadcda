"""How much text one token can stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

__all__ = ["extent", "longest_token"]

#: At most how many characters a normalizer makes one of: a composed one has a base and three marks.
_SHRINK: Final = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1, "ByteLevel": 1}
#: Pre-tokenizers that cut a text without dropping any of it.
_CUTS: Final = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts"}
#: Ids that no token has, after which the dict of all tokens is cheaper.
_MOST_MISSING: Final = 1 << 16


def extent(backend: tokenizers.Tokenizer) -> tuple[int, int]:
    """The largest token id, plus one, and the most characters of a token. One look at a time, since
    the dict of 250,000 tokens holds the GIL for 0.3 s."""
    left, size, longest = backend.get_vocab_size(with_added_tokens=True), 0, 0
    missing = 0
    while left:
        text = backend.id_to_token(size)
        size += 1
        if text is not None:
            left, longest = left - 1, max(longest, len(text))
        elif (missing := missing + 1) > _MOST_MISSING:
            vocabulary = backend.get_vocab(with_added_tokens=True)
            return max(vocabulary.values()) + 1, max(map(len, vocabulary))
    return size, longest


def longest_token(backend: tokenizers.Tokenizer, longest: int) -> int | None:
    """The most characters of a text that one token stands for, not counting whitespace that an
    added token may strip beside it. None if there is no bound: characters outside the vocabulary
    become one unknown token, or no token, however many they are."""

    def has(text: str | None) -> bool:
        return text is not None and backend.token_to_id(text) is not None

    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return None
    cuts, normalizers = [*_steps(backend.pre_tokenizer)], [*_steps(backend.normalizer)]
    names = {step["type"] for step in cuts}
    if names - _CUTS or any(step.get("behavior") == "Removed" for step in cuts):
        return None
    if "ByteLevel" in names or any(step["type"] == "ByteLevel" for step in normalizers):
        known = all(map(has, ByteLevel.alphabet()))
    elif model.byte_fallback:
        known = all(has(f"<0x{byte:02X}>") for byte in range(256))
    else:
        known = has(model.unk_token) and not model.fuse_unk
    if not known:
        return None
    for step in normalizers:
        shrink = _SHRINK.get(step["type"]) or _shrink_of_replace(step)
        if shrink is None:
            return None
        longest *= shrink
    return longest


def _shrink_of_replace(step: dict[str, Any]) -> int | None:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new) >= len(old) else None
    return None


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer, flattened, as the tokenizer's file describes it."""
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
    for inner in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
        yield from _flat(inner)
