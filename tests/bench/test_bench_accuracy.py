"""`asyncinfer bench accuracy` on a small text: perplexity as transformers has it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from models.gguf_files import write_gguf
from transformers import AutoModelForCausalLM

from asyncinfer import ModelLoadError
from asyncinfer.attention import KVFormat
from asyncinfer.bench import AccuracyOptions, BenchError, measure_accuracy
from asyncinfer.builtin import DRAFT_PATH
from asyncinfer.runner import opening
from asyncinfer.testing import Tokenizer

TEXTS = ("def add(a, b):\n    return a + b\n" * 12, "import os\n", "x")
CONTEXT = 64


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    paths = [tmp_path / f"{number}.py" for number in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_text(text)
    return tuple(map(str, paths))


def test_every_token_is_predicted_once_after_what_a_sequence_holds(
    files: tuple[str, ...],
) -> None:
    options = AccuracyOptions(
        models=(str(DRAFT_PATH),), text=files, context=CONTEXT, device="cpu", dtypes=("float32",)
    )
    heard: list[str] = []
    result = measure_accuracy(options, heard.append)
    tokenizer = Tokenizer.from_folder(DRAFT_PATH)
    peer = AutoModelForCausalLM.from_pretrained(DRAFT_PATH, dtype=torch.float32)
    nats, tokens = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor(tokenizer.encode(text))
        tokens += len(ids) - 1
        for start in range(0, len(ids) - 1, CONTEXT - 2):
            piece = ids[start : start + CONTEXT - 1][None]
            with torch.inference_mode():
                nats += peer(piece, labels=piece).loss.item() * (piece.shape[1] - 1)
    assert tokens > 2 * CONTEXT
    assert result.tokens == tokens
    plain, *smaller = result.rows
    assert plain.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert [(row.weights, row.kv) for row in result.rows] == [
        ("plain", "plain"),
        ("int8", "plain"),
        ("fp8", "plain"),
        ("int4", "plain"),
        ("int4-128", "plain"),
        ("plain", "fp8"),
        ("plain", "int8"),
        ("plain", "int4"),
        ("int8", "fp8"),
        ("int8", "int8"),
    ]
    assert len(heard) == 10
    for row in smaller:
        # Each says something else, and none something quite else.
        assert 1e-7 < abs(row.perplexity / plain.perplexity - 1) < 0.2
    assert len({row.perplexity for row in result.rows}) == 10
    figures = {figure.name: figure.value for figure in result.figures()}
    name = "draft, float32, weights {}, KV plain"
    assert figures[f"{name.format('plain')}: perplexity"] == plain.perplexity
    more = 100 * (smaller[0].perplexity / plain.perplexity - 1)
    assert figures[f"{name.format('int8')}: more"] == pytest.approx(more)
    assert all(row.tokens_per_second > 0 for row in result.rows)
    sizes = {row.weights: row.weight_bytes for row in result.rows}
    assert sizes["int4-128"] < sizes["int4"] < sizes["int8"] < sizes["plain"]


def test_any_two_formats_and_models(files: tuple[str, ...], tmp_path: Path) -> None:
    """A file with the same tokens, beside the folder it was made of."""
    model = AutoModelForCausalLM.from_pretrained(DRAFT_PATH, dtype=torch.float32)
    words = json.loads((DRAFT_PATH / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = {
        "tokenizer.ggml.tokens": sorted(words, key=words.__getitem__),
        "tokenizer.ggml.token_type": [3] + [1] * (len(words) - 1),
        "tokenizer.ggml.merges": ["i n"],
    }
    file = write_gguf(model, tmp_path / "draft.gguf", gguf.GGMLQuantizationType.Q8_0, **tokens)
    options = AccuracyOptions(
        models=(str(DRAFT_PATH), str(file)),
        text=files[:1],
        context=CONTEXT,
        tokens=40,
        device="cpu",
        weights=("plain", "floats"),
        kv=("int8",),
    )
    result = measure_accuracy(options)
    assert result.tokens == 39
    assert [(row.model, row.weights, row.kv) for row in result.rows] == [
        ("draft", "plain", "int8"),
        ("draft", "floats", "int8"),
        ("draft.gguf", "plain", "int8"),
        ("draft.gguf", "floats", "int8"),
    ]
    folder, same, packed, floats = result.rows
    assert folder.perplexity == same.perplexity
    assert packed.perplexity == pytest.approx(floats.perplexity, rel=1e-4)
    assert 1e-7 < abs(packed.perplexity / folder.perplexity - 1) < 0.01
    assert packed.weight_bytes < floats.weight_bytes
    tokens["tokenizer.ggml.tokens"] = [*tokens["tokenizer.ggml.tokens"][::-1]]
    other = write_gguf(model, tmp_path / "other.gguf", **tokens)
    with pytest.raises(BenchError, match="other tokens than the first"):
        measure_accuracy(replace(options, models=(str(DRAFT_PATH), str(other)), tokens=None))


def test_a_format_that_the_device_does_not_take(
    files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = opening.choose_kv

    def chosen(name: str, device: torch.device) -> KVFormat:
        if name == "fp8":
            raise ModelLoadError("kv='fp8': planted")
        return choose(name, device)

    monkeypatch.setattr(opening, "choose_kv", chosen)
    heard: list[str] = []
    options = AccuracyOptions(
        models=(str(DRAFT_PATH),),
        text=files[1:],
        context=CONTEXT,
        device="cpu",
        weights=("plain", "int8"),
        kv=("plain", "fp8", "int8"),
    )
    rows = measure_accuracy(options, heard.append).rows
    assert [row.kv for row in rows] == ["plain", "int8"] * 2
    assert heard.count("left out: kv='fp8': planted") == 2
    with pytest.raises(ModelLoadError):
        measure_accuracy(replace(options, context=1 << 30))


def test_a_context_without_room() -> None:
    with pytest.raises(BenchError, match="context=3: must be at least 4"):
        measure_accuracy(AccuracyOptions(context=3))
    with pytest.raises(BenchError, match="tokens=1: must be at least 2"):
        measure_accuracy(AccuracyOptions(tokens=1))


@pytest.mark.parametrize("quick", [False, True])
def test_text_that_cannot_be_read(tmp_path: Path, quick: bool) -> None:
    with pytest.raises(BenchError, match=r"text: .*missing\.py"):
        measure_accuracy(AccuracyOptions(text=(str(tmp_path / "missing.py"),), quick=quick))
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(BenchError, match="text: 'utf-8'"):
        measure_accuracy(AccuracyOptions(text=(str(tmp_path / "bytes.py"),)))
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(BenchError, match="not even two tokens"):
        measure_accuracy(AccuracyOptions(text=(str(tmp_path / "empty.py"),)))
