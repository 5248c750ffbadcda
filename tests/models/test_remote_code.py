"""Checkpoints that bring code along: it is never read nor run. What is one of our families is
loaded without it, all else is refused."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GPT2Config
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from asyncinfer import Engine
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cli import main
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import Family, ModelConfig, examine, parse_config
from asyncinfer.plugins import models
from asyncinfer.text import Tokenizer

CODE = {
    "AutoConfig": "configuration_llama.LlamaConfig",
    "AutoModel": "modeling_llama.LlamaModel",
    "AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
SHAPE = json.loads((MODEL_PATH / "config.json").read_text())
SLOW, FAST = "tokenization_x.XTokenizer", "tokenization_x_fast.XTokenizerFast"


def parse(**values: Any) -> ModelConfig:
    return parse_config({**SHAPE, **LLAMA, "auto_map": CODE, **values})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped model with files that end the tests when they are run, or wait when opened."""
    for file in MODEL_PATH.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    change(tmp_path, "config.json", **LLAMA, auto_map=CODE)
    (tmp_path / "modeling_llama.py").write_text("import os; os._exit(87)")
    os.mkfifo(tmp_path / "configuration_llama.py")
    return tmp_path


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_code_of_a_family_here_is_set_aside() -> None:  # fault 49
    config = parse()
    assert len(config.notes) == 1
    assert "auto_map is set aside" in config.notes[0]
    assert "LlamaForCausalLM is the engine's own" in config.notes[0]
    assert parse(auto_map=None).notes == parse(auto_map={}).notes == ()
    # As checkpoints write it that take their code from another repository, or only a tokenizer's.
    assert parse(auto_map={"AutoModelForCausalLM": "org/name--modeling_llama.LlamaForCausalLM"})
    assert parse(auto_map={"AutoTokenizer": [SLOW, None]})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llamafied"},
        {"model_type": "mistral"},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"architectures": ["LlamaForCausalLM", "EvilForCausalLM"]},
        {"architectures": ["EvilForCausalLM", "LlamaForCausalLM"]},
        {"auto_map": {**CODE, "AutoModelForCausalLM": "modeling_llama.EvilForCausalLM"}},
        {"auto_map": {**CODE, "AutoModelForCausalLM": "LlamaForCausalLM.Evil"}},
        {"auto_map": {**CODE, "AutoModelForCausalLM": ["LlamaForCausalLM"]}},
        {"auto_map": "modeling_llama.LlamaForCausalLM"},
        {"auto_map": ["modeling_llama.LlamaForCausalLM"]},
    ],
)
def test_code_that_may_compute_something_else_is_refused(changes: Any) -> None:  # fault 49
    with pytest.raises(ModelLoadError, match=r": auto_map=.*never run"):
        parse(**changes)


def test_code_of_an_architecture_that_is_not_ours() -> None:  # fault 49
    """Under a model_type that is ours."""
    with pytest.raises(ModelLoadError, match=r"architectures=\['EvilForCausalLM'\].*never run"):
        parse(architectures=["EvilForCausalLM"])


def test_a_family_that_does_not_say_its_model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Family):
        pass

    monkeypatch.setattr(models, "_registered", {})
    monkeypatch.setattr(models, "_loaded", {})
    models.register("OddForCausalLM", Odd)
    odd = {"architectures": ["OddForCausalLM"], "model_type": "odd", "auto_map": {"AutoModel": "x"}}
    for model_type in ("odd", None):
        with pytest.raises(ModelLoadError, match=r"auto_map=.*never run"):
            parse(**{**odd, "model_type": model_type})
    Odd.model_type = "odd"
    assert parse(**odd).notes
    assert parse(**{**odd, "auto_map": None}).architecture == "OddForCausalLM"


@pytest.mark.parametrize("name", sorted(models.names()))
def test_every_family_says_its_model_type(name: str) -> None:
    """As transformers knows it, which writes one architecture in another case than its makers."""
    model_type = models.resolve(name).model_type  # type: ignore[attr-defined]
    config = GPT2Config() if model_type == "gpt2" else AutoConfig.for_model(model_type)
    assert config.model_type == model_type
    known = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    assert name.lower() in [names.get(model_type, "").lower() for names in known]


def test_the_code_of_a_tokenizer(folder: Path) -> None:  # fault 49
    """It is set aside where there is a fast tokenizer, which is a file and no code."""
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [SLOW, FAST]})
    assert Tokenizer.from_folder(folder).vocab_size == 4096
    assert "tokenizer's auto_map is set aside" in examine(folder).notes[1]
    change(folder, "tokenizer_config.json", auto_map={"AutoProcessor": "x.Processor"})
    assert len(examine(folder).notes) == 1


@pytest.mark.parametrize(
    "code", [{"AutoTokenizer": [SLOW, None]}, {"AutoTokenizer": SLOW}, [SLOW, None], SLOW]
)
def test_a_tokenizer_that_is_code_is_refused(folder: Path, code: Any) -> None:  # fault 49
    change(folder, "tokenizer_config.json", auto_map=code)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: auto_map=.*never run"):
        Tokenizer.from_folder(folder)
    (problem,) = examine(folder).problems
    assert "never run" in problem


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_engine_says_what_it_set_aside(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [SLOW, FAST]})
    caplog.set_level(logging.INFO, "asyncinfer")
    async with Engine(folder, device="cpu", kv_bytes=1 << 22) as engine:
        mine = await engine.generate("def add(a, b):", max_tokens=8, temperature=0.0)
    async with Engine(MODEL_PATH, device="cpu", kv_bytes=1 << 22) as engine:
        plain = await engine.generate("def add(a, b):", max_tokens=8, temperature=0.0)
    assert mine.token_ids == plain.token_ids
    first, second = [r for r in caplog.records if r.msg.startswith("engine_loaded")]
    assert len(first.asyncinfer["notes"]) == 2  # type: ignore[attr-defined]
    assert "notes" not in second.asyncinfer  # type: ignore[attr-defined]


def test_the_command_says_it_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit) as done:
            main(["models", str(folder), *options])
        assert done.value.code == 0
        assert "auto_map is set aside" in capsys.readouterr().out


def test_what_the_nearest_family_lacks_is_said_beside_code(folder: Path) -> None:
    change(folder, "config.json", architectures=["OddForCausalLM"])
    first, nearest = examine(folder).problems
    assert "never run" in first
    assert nearest.startswith("its tensors are those of LlamaForCausalLM")
