"""How much text a token can stand for: never less than what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.text import Tokenizer
from asyncinfer.text.longest_token import extent, longest_token


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


def longest_of(backend: tokenizers.Tokenizer) -> int | None:
    _, longest = extent(backend)
    return longest_token(backend, longest)


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
def test_the_longest_token(options: dict[str, Any], longest: int | None) -> None:
    assert longest_of(tokenizer(**options)) == longest


def test_a_vocabulary_that_lacks_a_byte_drops_it() -> None:
    words = pre_tokenizers.ByteLevel.alphabet()[1:]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = BYTES
    assert longest_of(backend) is None


@pytest.mark.parametrize("last", [7, 1 << 20])
def test_ids_may_have_gaps(last: int) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "bbb": last}, []))
    backend.add_tokens(["<extra>"])
    size = max(backend.get_vocab().values()) + 1
    assert extent(backend) == (size, 7)
    assert extent(tokenizers.Tokenizer(models.BPE({}, []))) == (0, 0)


def test_the_shipped_model() -> None:
    shipped = Tokenizer.from_folder(Path(MODEL_PATH))
    longest = shipped.longest_token
    assert longest is not None
    for text in (" " * 1000, "a" * 1000, "<|endoftext|>" * 100, "def f(x):\n        return"):
        ids = shipped.encode(text, add_special_tokens=False)
        assert len(text) <= longest * len(ids)
