"""Tokenizers that are published as code and a list of ranked tokens, which the library `tiktoken`
reads. The code is never run: this module contains what its few lines say."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from asyncinfer.errors import ModelLoadError, short_repr
from asyncinfer.text.bytelevel import BYTE_TO_CHAR
from asyncinfer.text.gguf_words import CUTS
from asyncinfer.text.merges import LONGEST, all_merges

__all__ = ["read_tiktoken"]

_MOST_BYTES: Final = 64 << 20
_MOST_TOKENS: Final = 1 << 22
#: The most tokens besides those of the file.
_MOST_ADDED: Final = 4096


@dataclass(frozen=True, slots=True)
class _TokenizerCode:
    """What the code of one class says beyond the file."""

    #: How a text is split into words, by a name in `CUTS`.
    cut: str
    composed: bool = False
    #: Special tokens that follow those of the file, if the code names them.
    special: tuple[str, ...] = ()


#: By the file's name.
_CODE: Final[Mapping[str, _TokenizerCode]] = {
    "tiktoken.model": _TokenizerCode("kimi-k2"),
    "hy.tiktoken": _TokenizerCode(
        "qwen2",
        composed=True,
        special=(
            *("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"),
            *(f"<|extra_{index}|>" for index in range(205)),
        ),
    ),
}


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer in the file `path`, with the tokens that `settings`, the content of
    `tokenizer_config.json`, adds by their ids. `ModelLoadError` names file and line."""
    code = _CODE[path.name]
    tokens = _read_tokens(path)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # A word that is a token is kept whole, as the library does.
    model = models.BPE(vocabulary, all_merges(tokens, vocabulary), ignore_merges=True)
    backend = tokenizers.Tokenizer(model)
    if code.composed:
        backend.normalizer = normalizers.NFC()
    cut = CUTS[code.cut]
    assert isinstance(cut, str)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    file = str(path.with_name("tokenizer_config.json"))
    named = _named_tokens(settings, len(tokens) + _MOST_ADDED, file)
    for index, name in enumerate(code.special, len(tokens)):
        named.setdefault(index, AddedToken(name, special=True, normalized=False))
    end = max(named, default=-1) + 1
    added = [named.get(index) or _reserved(index) for index in range(len(tokens), end)]
    backend.add_tokens(added)
    if backend.get_vocab_size() != len(tokens) + len(added):
        # The library gives no second id to a known token, so later tokens would move.
        raise ModelLoadError("added_tokens_decoder: names a token twice", file=file)
    return backend


def _reserved(index: int) -> AddedToken:
    return AddedToken(f"<|reserved_token_{index}|>", special=True, normalized=False)


def _named_tokens(settings: Mapping[str, Any], end: int, file: str) -> dict[int, AddedToken]:
    """The tokens under `added_tokens_decoder`, by their ids, which are below `end`."""
    found = {}
    given = settings.get("added_tokens_decoder")
    for key, token in (given if isinstance(given, dict) else {}).items():
        name = token.get("content") if isinstance(token, dict) else None
        index = int(key) if key.isdecimal() and len(key) < 10 else end
        if index >= end or not isinstance(name, str) or not name:
            raise ModelLoadError(
                f"added_tokens_decoder[{short_repr(key)}]: must be a token with its content, and "
                f"an id below {end}",
                file=file,
            )
        special = token.get("special") is not False
        found[index] = AddedToken(name, special=special, normalized=False)
    return found


def _read_tokens(path: Path) -> list[str]:
    """The tokens by their ids, in the alphabet of `BYTE_TO_CHAR`."""
    if path.stat().st_size > _MOST_BYTES:
        raise ModelLoadError(f"more than {_MOST_BYTES} bytes", file=str(path))
    tokens: dict[str, None] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        word, _, rank = line.partition(b" ")
        try:
            raw = base64.b64decode(word, validate=True)
        except binascii.Error:
            raw = b""
        token = "".join(BYTE_TO_CHAR[byte] for byte in raw)
        if not 0 < len(raw) <= LONGEST or token in tokens or rank.strip() != b"%d" % len(tokens):
            raise ModelLoadError(
                f"line {number}: must be a new token of at most {LONGEST} bytes in base64, and "
                f"its rank, {len(tokens)}",
                file=str(path),
            )
        tokens[token] = None
        if len(tokens) > _MOST_TOKENS:
            raise ModelLoadError(f"more than {_MOST_TOKENS} tokens", file=str(path))
    if missing := set(BYTE_TO_CHAR.values()) - tokens.keys():
        raise ModelLoadError(f"lacks {len(missing)} of the 256 bytes", file=str(path))
    return list(tokens)
