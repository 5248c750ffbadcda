"""The cache of words inside the `tokenizers` library, switched off where it would keep prompts."""

from __future__ import annotations

from typing import Final

import tokenizers

from asyncinfer.text.panic import panicked

__all__ = ["keep_no_prompts"]

_TWO_WORDS: Final = "two words"


def keep_no_prompts(backend: tokenizers.Tokenizer) -> None:
    """Switch the cache off unless the tokenizer splits a text into words before its model sees it.

    A BPE or Unigram model remembers the first 10,000 words of under 256 bytes that it met, with
    some 35 bytes for each byte. Words repeat. Where nothing splits a text, as in many
    SentencePiece models, each short prompt is one word that seldom repeats, and the cache grows to
    45 MiB of them.
    """
    model = backend.model
    # The library's maintainers name this method for the purpose; there is no public one.
    resize = getattr(model, "_resize_cache", None)
    if resize is not None and not _splits_words(backend):
        resize(0)


def _splits_words(backend: tokenizers.Tokenizer) -> bool:
    text = _TWO_WORDS
    try:
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        splitter = backend.pre_tokenizer
        return splitter is not None and len(splitter.pre_tokenize_str(text)) > 1
    except BaseException as error:
        if not panicked(error):
            raise
        # The tokenizer fails for every text with words, and so remembers none.
        return False
