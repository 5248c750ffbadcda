"""How much text a token can stand for: never less than what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.text import Tokenizer
from asyncinfer.text.longest_token import longest_token


def tokenizer(
    *, normalizer: Any = None, pre_tokenizer: Any = None, model: Any = None, **options: Any
) -> tokenizers.Tokenizer:
    words = [*pre_tokenizers.ByteLevel.alphabet(), "aaaa", "<unk>"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(model or models.BPE(vocabulary, [], **options))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    return backend


def extent(backend: tokenizers.Tokenizer) -> int | None:
    return longest_token(backend, backend.get_vocab())


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"pre_tokenizer": BYTES}, 6),
        ({"byte_fallback": True}, 6),
        ({"unk_token": "<unk>"}, 6),
        # One token for a run of any length, and none for what is not known.
        ({"unk_token": "<unk>", "fuse_unk": True}, None),
        ({}, None),
        ({"pre_tokenizer": BYTES, "normalizer": normalizers.NFC()}, 24),
        ({"pre_tokenizer": BYTES, "normalizer": normalizers.Strip()}, None),
        ({"byte_fallback": True, "normalizer": normalizers.Replace(" ", "▁")}, 6),
        ({"byte_fallback": True, "normalizer": normalizers.Replace("  ", " ")}, None),
        ({"byte_fallback": True, "pre_tokenizer": pre_tokenizers.Whitespace()}, None),
        ({"byte_fallback": True, "pre_tokenizer": pre_tokenizers.Split("x", "removed")}, None),
        ({"model": models.WordLevel({"a": 0}, unk_token="a")}, None),
        ({"model": models.Unigram([("a", 0.0)], 0, False)}, None),
    ],
)
def test_extent(options: dict[str, Any], longest: int | None) -> None:
    assert extent(tokenizer(**options)) == longest


def test_a_vocabulary_that_lacks_a_byte_drops_it() -> None:
    words = pre_tokenizers.ByteLevel.alphabet()[1:]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = BYTES
    assert extent(backend) is None


def test_the_shipped_model() -> None:
    shipped = Tokenizer.from_folder(Path(MODEL_PATH))
    longest = shipped.longest_token
    assert longest is not None
    for text in (" " * 1000, "a" * 1000, "<|endoftext|>" * 100, "def f(x):\n        return"):
        ids = shipped.encode(text, add_special_tokens=False)
        assert len(text) <= longest * len(ids)
