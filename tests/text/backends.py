"""Small tokenizers of every decoder kind, made in memory."""

from __future__ import annotations

from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from asyncinfer.text.bytelevel import BYTE_TO_CHAR

PIECES = [
    "▁",
    "▁▁",
    "▁def",
    "def",
    "▁ret",
    "urn",
    "é",
    "☃",
    "▁☃",
    "\n",
    "a",
    "b",
    "�",
    "<0x0",
    " x",
]


def byte_level() -> tokenizers.Tokenizer:
    """Bytes, words, pieces of characters (and over their edges), added and special tokens."""
    parts = [bytes([byte]) for byte in range(256)]
    parts += [b" def", b"return", "é".encode(), "☃".encode(), "☃".encode()[:2], b"\xf0\x9f"]
    parts += [b"\x83a", "☃é".encode()[1:], b"\xff\xfe", b"a\xe2"]
    vocabulary = {"".join(BYTE_TO_CHAR[b] for b in part): i for i, part in enumerate(parts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["<tool call>", "é☃ added", "Ġplain"])
    backend.add_special_tokens(["<s>", "<|im end|>"])
    return backend


def sentencepiece(strip: int = 1) -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral (with `strip`), or Gemma (without)."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    model = models.BPE(
        vocab={name: i for i, name in enumerate(names)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps.append(decoders.Strip(" ", strip, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens(["▁added", "<tool>"])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def byte_fallback(*steps: object) -> tokenizers.Tokenizer:
    """Words, spaces and bytes; the decoder is `ByteFallback` and then `steps`."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁end", "word", "▁"]
    backend = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), *steps])
    return backend


def _words(decoder: object, words: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    return backend


OTHERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "wordpiece": lambda: _words(
        decoders.WordPiece(), ["he", "##llo", "wor", "##ld", ",", ".", "'", "n't", "é"]
    ),
    "metaspace": lambda: _words(decoders.Metaspace(), ["▁he", "llo", "▁", "▁▁", "x▁y", "é"]),
    "suffix": lambda: _words(decoders.BPEDecoder(), ["he", "llo</w>", "</w>", "é", "wor</w>"]),
    "none": lambda: _words(None, ["he", "llo", "é"]),
    "bytes in a sequence": lambda: _words(
        decoders.Sequence([decoders.Replace("_", " "), decoders.ByteLevel()]),
        ["he", "Ã", "©", "ð", "Ł", "ĺ", "Ģ", "_x", "ÿ"],
    ),
}
