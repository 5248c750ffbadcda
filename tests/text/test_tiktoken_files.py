"""Tokenizers that are a list of tokens, and code which is never run, beside `tiktoken`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from text.test_gguf_tokenizer import HARD
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from asyncinfer.errors import ModelLoadError
from asyncinfer.models.remote_code import tokenizer_code
from asyncinfer.text import Detokenizer, Tokenizer
from asyncinfer.text.bytelevel import CHAR_TO_BYTE
from asyncinfer.text.gguf_words import CUTS

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    *HARD,
    "a" * 50 + " " * 50 + "\n" * 20,
    "x\u0301 e\u0301 汉字abc ABCdef 中文English混合 北京市 Pascal's don'T 1234567",
    "\x01\x1f\x7f\x85\u2028\u200d ﷺ Ⅷ 𝔘𝔫𝔦 𠜎 Ελληνικά ქართული தமிழ்",
]
KIMI = {
    "added_tokens_decoder": {
        "512": {"content": "[BOS]", "special": True},
        "514": {"content": "<|call|>", "special": False},
    },
    "bos_token": "[BOS]",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
}
HUNYUAN = {"auto_map": {"AutoTokenizer": ["tokenization_hy.HYTokenizer", None]}}


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    """512 tokens, in the order of their merging."""
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=512,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([(ROOT / "README.md").read_text("utf-8"), *TEXTS * 3], trainer)
    by_id = sorted(backend.get_vocab().items(), key=lambda pair: pair[1])
    return [bytes(CHAR_TO_BYTE[char] for char in token) for token, _ in by_id]


def write(folder: Path, name: str, tokens: list[bytes], settings: dict[str, Any]) -> Path:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (folder / name).write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("name", "settings", "cut", "special"),
    [
        ("tiktoken.model", KIMI, "kimi-k2", {"[BOS]": 512, "<|call|>": 514}),
        ("hy.tiktoken", HUNYUAN, "qwen2", {"<|endoftext|>": 512, "<|extra_204|>": 721}),
    ],
)
def test_as_the_library_reads_it(
    name: str,
    settings: dict[str, Any],
    cut: str,
    special: dict[str, int],
    tokens: list[bytes],
    tmp_path: Path,
) -> None:
    ours = Tokenizer.from_folder(write(tmp_path, name, tokens, settings))
    theirs = tiktoken.Encoding(
        name,
        pat_str=str(CUTS[cut]),
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens=special,
    )
    (note,) = tokenizer_code(tmp_path)
    assert f"{name} is read without it" in note
    assert ours.vocab_size == theirs.n_vocab
    named = list(special)
    for text in [*TEXTS, f"a{named[0]}b {named[1]}\n"]:
        ids = ours.encode(text)
        if name == "tiktoken.model" or "\u0301" not in text:
            assert ids == theirs.encode(text, allowed_special="all"), text
            assert ours.decode(ids, False) == theirs.decode(ids) == text
        detokenizer = Detokenizer(ours)
        shown = [*map(detokenizer.push, ids), detokenizer.flush()]
        assert "".join(shown) == ours.decode(ids)
    # Hunyuan's code composes letters and their marks.
    assert ours.encode("e\u0301") == theirs.encode("é" if name == "hy.tiktoken" else "e\u0301")
    # What the config does not call special is text, as marks of calls are.
    ids = [special[one] for one in named]
    assert ours.decode(ids) == ("<|call|>" if name == "tiktoken.model" else "")


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [
        (b"!!! 3", "line 4: must be a new token of at most 512 bytes in base64, and its rank, 3"),
        (b"YQ== 7", "line 4"),
        (b"YQ==", "line 4"),
        (base64.b64encode(b"a" * 513) + b" 3", "line 4"),
        (base64.b64encode(b"!") + b" 3", "line 4"),
        (None, "lacks 253 of the 256 bytes"),
    ],
)
def test_a_file_that_is_none(spoiled: bytes | None, says: str, tmp_path: Path) -> None:
    first = [bytes([byte]) for byte in (0x21, 0x22, 0x23)]
    write(tmp_path, "tiktoken.model", first, KIMI)
    if spoiled is not None:
        with (tmp_path / "tiktoken.model").open("ab") as file:
            file.write(spoiled)
    with pytest.raises(ModelLoadError, match=says) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path / "tiktoken.model") in str(caught.value)


@pytest.mark.parametrize(
    ("key", "token", "says"),
    [
        ("512", 3, r"added_tokens_decoder\['512'\]"),
        ("512", {"content": 3}, r"added_tokens_decoder\['512'\]"),
        ("512", {}, r"added_tokens_decoder\['512'\]"),
        ("4608", {"content": "x"}, "an id below 4608"),
        ("9" * 5000, {"content": "x"}, "an id below 4608"),
        ("512", {"content": "a"}, "names a token twice"),
    ],
)
def test_an_added_token_that_is_none(
    key: str, token: Any, says: str, tokens: list[bytes], tmp_path: Path
) -> None:
    write(tmp_path, "tiktoken.model", tokens, {**KIMI, "added_tokens_decoder": {key: token}})
    with pytest.raises(ModelLoadError, match=says):
        Tokenizer.from_folder(tmp_path)


def test_other_code_is_still_refused(tokens: list[bytes], tmp_path: Path) -> None:
    code = {"AutoTokenizer": ["tokenization_odd.OddTokenizer", None]}
    write(tmp_path, "tiktoken.model", tokens, {"auto_map": code})
    with pytest.raises(ModelLoadError, match="never run"):
        Tokenizer.from_folder(tmp_path)
