"""`Tokenizer`: its files, its ids, text that is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from text import backends
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.errors import InvalidRequest, ModelLoadError
from asyncinfer.text import ChatTemplate, Tokenizer


def write(folder: Path, backend: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
    (backend or backends.byte_level()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_round_trip_on_the_shipped_model() -> None:
    tokenizer = Tokenizer.from_folder(MODEL_PATH)
    text = "def add(a, b):\n    return a + b  # ☃\n"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|endoftext|>" + text
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.eos_ids == tokenizer.special_ids == {tokenizer.bos_id}


def test_as_transformers_reads_the_same_folder() -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(MODEL_PATH)
    ours = Tokenizer.from_folder(MODEL_PATH)
    text = Path(__file__).read_text(encoding="utf-8")
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, {theirs.eos_token_id})


def test_bytes_of_tokens() -> None:
    tokenizer = Tokenizer(backends.byte_level())
    ids = range(tokenizer.vocab_size)
    raw = b"".join(tokenizer.token_bytes(i) or b"" for i in ids)
    assert raw.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    llama = Tokenizer(backends.sentencepiece())
    assert llama.token_bytes(1 + 0x0A) == b"\n"
    assert llama.token_bytes(257 + backends.PIECES.index("▁def")) == b" def"


def test_byte_level_token_ids_are_bytes() -> None:
    tokenizer = Tokenizer.byte_level()
    assert tokenizer.encode("é") == [256, 0xC3, 0xA9]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (256, {257}, 258)
    assert Tokenizer.byte_level(add_bos=False).encode("") == []


@pytest.mark.parametrize(
    ("files", "bos", "eos"),
    [
        ({}, None, set()),
        ({"config": {"bos_token_id": 1, "eos_token_id": 2}}, 1, {2}),
        (
            {"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [3, 4]}},
            None,
            {3, 4},
        ),
        (
            {
                "tokenizer_config": {"bos_token": {"content": "A"}, "eos_token": "B"},
                "generation_config": {"bos_token_id": 9, "eos_token_id": 7},
            },
            0x41,
            {0x42, 7},
        ),
        ({"tokenizer_config": {"bos_token": None, "eos_token": "not in it"}}, None, set()),
    ],
)
def test_begin_and_end_tokens(
    tmp_path: Path, files: dict[str, Any], bos: int | None, eos: set[int]
) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, **files))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (bos, eos)


def test_tokens_called_special_by_the_config_are_skipped(tmp_path: Path) -> None:
    tokens = {"5": {"content": "<tool call>", "special": True}, "6": {"content": "A"}}
    settings = {"additional_special_tokens": ["B"], "added_tokens_decoder": tokens}
    tokenizer = Tokenizer.from_folder(write(tmp_path, tokenizer_config=settings))
    ids = tokenizer.encode("A<tool call>B")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "A"


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_keep_the_space_that_they_take(special: bool, tmp_path: Path) -> None:
    """As Phi-3's do."""
    backend = backends.byte_level()
    backend.add_tokens([tokenizers.AddedToken("<|user|>", rstrip=True, special=special)])
    settings = {"additional_special_tokens": ["<|user|>"]}
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend, tokenizer_config=settings))
    assert tokenizer.encode("<|user|>\n A") == tokenizer.encode("<|user|>A")
    assert tokenizer.decode(tokenizer.encode("<|user|>A")) == "A"


def test_tokens_that_only_other_files_list(tmp_path: Path) -> None:
    backend = backends.byte_level()
    first = backend.get_vocab_size()
    tokens = {str(first + 1): {"content": "<call>", "special": True}, "x": {}, "7": {"content": 5}}
    tokens["9" * 5000] = {"content": "<farther>"}
    folder = write(
        tmp_path,
        backend,
        tokenizer_config={"added_tokens_decoder": tokens},
        added_tokens={
            "<think>": first,
            "<far>": first + 3,
            "<two>": [first],
            "<by>": {"id": first},
        },
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<call><think>") == [first + 1, first]
    assert tokenizer.decode([first + 1, first]) == "<think>"
    assert len(tokenizer.encode("<far>")) > 1


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path) -> None:
    backend = backends.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    assert len(tokenizer.encode("x")) == 1
    assert len(tokenizer.encode("xyzxyzxyz")) == 9


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "not found"),
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer.json", '{"model": {}}', "not a tokenizer"),
        ("tokenizer_config.json", "{", "JSON"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("tokenizer_config.json", b"\xff", "JSON"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id"),
        ("config.json", '{"bos_token_id": -1}', "bos_token_id"),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, name: str, content: str | bytes | None, says: str
) -> None:
    path = write(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ModelLoadError, match=says) as caught:
        Tokenizer.from_folder(tmp_path)
    assert caught.value.file == str(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """The library would hold all of it, before it says that it is no JSON."""
    os.truncate(write(tmp_path) / "tokenizer.json", 6 << 30)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: 6442450944 bytes, more than 268"):
        Tokenizer.from_folder(tmp_path)


def test_only_regular_files_of_the_checkpoint(tmp_path: Path) -> None:  # fault 48
    folder, outside = tmp_path / "model", tmp_path / "secret.json"
    folder.mkdir()
    outside.write_text("{}")
    write(folder)
    link = folder / "tokenizer_config.json"
    link.symlink_to(outside)
    with pytest.raises(ModelLoadError, match="link out of"):
        Tokenizer.from_folder(folder)
    with pytest.raises(ModelLoadError, match="link out of"):
        ChatTemplate.from_folder(folder)
    link.unlink()
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(ModelLoadError, match="not a regular file"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(("text", "at"), [("\ud800", 0), ("ab\udfffc", 2), ("☃" * 9 + "\udc80", 9)])
def test_lone_surrogates(text: str, at: int) -> None:  # fault 31
    with pytest.raises(InvalidRequest, match=f"offset {at}") as caught:
        Tokenizer.byte_level().encode(text)
    assert caught.value.field == "prompt"


def test_bad_words_are_found_wherever_they_stand() -> None:
    for tokenizer in (Tokenizer(backends.sentencepiece()), Tokenizer.from_folder(MODEL_PATH)):
        banned = tokenizer.bad_word_ids("return")
        assert len(set(banned)) == len(banned) >= 2
        for text in ("return", "x return", "\nreturn"):
            ids = tuple(tokenizer.encode(text))
            assert any(_contains(ids, word) for word in banned), text


def test_encode_releases_the_gil() -> None:
    tokenizer = Tokenizer.byte_level()
    worker = threading.Thread(target=tokenizer.encode, args=("def f(x):\n" * 100_000,))
    worker.start()
    turns = 0
    while worker.is_alive():
        time.sleep(0)
        turns += 1
    # A call that held the GIL would leave this thread a handful of turns.
    assert turns > 100


def test_no_environment_no_output_after_a_fork() -> None:
    program = """
import os
before = dict(os.environ)
from asyncinfer.text import Tokenizer
tokenizer = Tokenizer.byte_level()
tokenizer.encode("a")
child = os.fork()
if child == 0:
    os._exit(tokenizer.encode("a") != [256, 97])
assert os.waitpid(child, 0)[1] == 0
assert dict(os.environ) == before
"""
    done = subprocess.run(
        # From Python 3.12 on it warns of every fork of a program with threads.
        [sys.executable, "-W", "ignore::DeprecationWarning:__main__", "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_empty_vocabulary() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE()))
    assert (tokenizer.vocab_size, tokenizer.encode("x"), tokenizer.decode([0])) == (0, [], "")


def _contains(ids: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return any(ids[i : i + len(word)] == word for i in range(len(ids)))
