"""What the `tokenizers` library remembers of prompts: words, and no whole text."""

from __future__ import annotations

import random

import pytest
import tokenizers
from text.backends import byte_level, sentencepiece
from tokenizers import models, normalizers, pre_tokenizers

from asyncinfer.bench.soak.process import in_use_mib
from asyncinfer.text import Tokenizer
from asyncinfer.text.bytelevel import byte_level_backend

TEXTS = 2000


def unigram() -> tokenizers.Tokenizer:
    pieces = [(letter, -1.0) for letter in "▁ etaoinshrdlu"]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return backend


def growth(tokenizer: Tokenizer) -> float:
    """MiB taken from malloc for texts that were all encoded, and let go."""
    choose = random.Random(5)

    def encode(count: int) -> None:
        for _ in range(count):
            tokenizer.encode("".join(choose.choices("etaoin shrdlu", k=160)))

    encode(200)
    before = in_use_mib()
    encode(TEXTS)
    after = in_use_mib()
    if before is None or after is None:
        pytest.skip("the system does not say what malloc gave")
    return after - before


@pytest.mark.parametrize(
    "backend", [byte_level_backend(add_bos=False), sentencepiece(), sentencepiece(0), unigram()]
)
def test_prompts_are_not_kept(backend: tokenizers.Tokenizer) -> None:
    # With the cache they are 3 MiB and more.
    assert growth(Tokenizer(backend)) < 1.0


def test_words_are_kept() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Lowercase()
    assert growth(Tokenizer(backend)) > 1.0
