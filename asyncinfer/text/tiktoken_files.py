"""Tokenizers that are published as a list of tokens in the order of their merging, as the library
`tiktoken` reads it, and as code. The code is never run: its few lines are stated here."""

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
from asyncinfer.text.merges import all_merges

__all__ = ["read_tiktoken"]

_MOST_BYTES: Final = 64 << 20
_MOST_TOKENS: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class _Code:
    """What the code of one class says beside the file."""

    #: How a text is cut into words, by a name in `CUTS`.
    cut: str
    composed: bool = False
    #: Special tokens that follow those of the file, where the code names them.
    special: tuple[str, ...] = ()


#: By the name of the file.
_CODE: Final[Mapping[str, _Code]] = {
    "tiktoken.model": _Code("kimi-k2"),
    "hy.tiktoken": _Code(
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
    # A word that is a token is taken as it is, as the library does.
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
    named = _named_tokens(settings, str(path.with_name("tokenizer_config.json")))
    for index, name in enumerate(code.special, len(tokens)):
        named.setdefault(index, AddedToken(name, special=True, normalized=False))
    for index in range(len(tokens), max(named, default=0) + 1):
        filler = AddedToken(f"<|reserved_token_{index}|>", special=True, normalized=False)
        backend.add_tokens([named.get(index, filler)])
    return backend


def _named_tokens(settings: Mapping[str, Any], file: str) -> dict[int, AddedToken]:
    """The tokens under `added_tokens_decoder`, by their ids."""
    found = {}
    given = settings.get("added_tokens_decoder")
    for key, token in (given if isinstance(given, dict) else {}).items():
        name = token.get("content") if isinstance(token, dict) else None
        if not str(key).isdecimal() or int(key) > _MOST_TOKENS or not isinstance(name, str):
            raise ModelLoadError(
                f"added_tokens_decoder[{short_repr(key)}]: must be a token with its content",
                file=file,
            )
        special = token.get("special") is not False
        found[int(key)] = AddedToken(name, special=special, normalized=False)
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
        if not raw or token in tokens or rank.strip() != b"%d" % len(tokens):
            raise ModelLoadError(
                f"line {number}: must be a new token in base64 and its rank, {len(tokens)}",
                file=str(path),
            )
        tokens[token] = None
        if len(tokens) > _MOST_TOKENS:
            raise ModelLoadError(f"more than {_MOST_TOKENS} tokens", file=str(path))
    if missing := set(BYTE_TO_CHAR.values()) - tokens.keys():
        raise ModelLoadError(f"lacks {len(missing)} of the 256 bytes", file=str(path))
    return list(tokens)
