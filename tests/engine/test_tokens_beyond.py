"""Tokens that a tokenizer has and the model's embedding lacks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from asyncinfer import InvalidRequest, ModelLoadError, SyncEngine
from asyncinfer.builtin import MODEL_PATH

ROWS: int = json.loads((MODEL_PATH / "config.json").read_text("utf-8"))["vocab_size"]
MARK = "<image_soft_token>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose tokenizer has one more token than its embedding, as Gemma 3's models of text
    have the one that images would replace."""
    model = tmp_path / "model"
    shutil.copytree(MODEL_PATH, model)
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([MARK])
    assert tokenizer.token_to_id(MARK) == ROWS
    tokenizer.save(str(model / "tokenizer.json"))
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**settings, "image_token": MARK}), "utf-8")
    return model


def test_an_added_token_without_an_embedding_is_text(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "asyncinfer")
    with SyncEngine(MODEL_PATH, device="cpu") as plain:
        right = plain.generate(f"see {MARK}", max_tokens=4)
        ids = plain.tokenizer.encode(f"see {MARK}")
    with SyncEngine(folder, device="cpu") as engine:
        assert engine.tokenizer.encode(f"see {MARK}") == ids
        assert engine.generate(f"see {MARK}", max_tokens=4).token_ids == right.token_ids
        with pytest.raises(InvalidRequest, match=f"{ROWS}"):
            engine.generate([ROWS], max_tokens=1)
    assert f"tokens that the model has no embedding for are read as text: {MARK}" in caplog.text


def test_a_vocabulary_that_is_larger_than_the_embedding_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    content["model"]["vocab"]["klingon"] = ROWS
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < ROWS]
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(ModelLoadError, match=f"token ids go up to {ROWS}"):
        with SyncEngine(folder, device="cpu"):
            pass
