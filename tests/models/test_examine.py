"""`examine`: whether a checkpoint can be loaded, and what is lacking, from headers alone."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import CASES, random_model
from models.gguf_files import write_gguf
from safetensors.torch import load_file, save_file

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.config import EngineConfig
from asyncinfer.engine.checkpoint import CheckpointSource
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import examine
from asyncinfer.plugins.architecture import find_architecture
from asyncinfer.weights.file_reader import FileReader


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: FileReader, file: str, tensor: str, start: int, target: memoryview) -> None:
        raise AssertionError(f"{tensor} was read")

    monkeypatch.setattr(FileReader, "fill", fill)


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    for file in MODEL_PATH.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_one_that_can_be_loaded() -> None:
    found = examine(MODEL_PATH)
    assert (found.architectures, found.problems) == (("LlamaForCausalLM",), ())
    tensors = load_file(MODEL_PATH / "model.safetensors")
    assert found.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert found.config is not None


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(ModelLoadError, match=r"cannot be opened: File name too long"):
        examine("x" * 5000)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}".replace(" ", "-"))
def test_the_nearest_family_is_its_own(case: tuple[str, str], tmp_path: Path) -> None:
    """Under another name every family's checkpoint is still told by its tensors: none differs."""
    random_model(*case).save_pretrained(tmp_path)
    assert not examine(tmp_path).problems
    change(tmp_path, architectures=["RenamedForCausalLM"])
    first, nearest = examine(tmp_path).problems
    assert "RenamedForCausalLM" in first
    assert nearest.startswith("its tensors are those of ")


def test_what_an_unknown_architecture_lacks(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_file(llama / "model.safetensors")
    layers = sum("q_proj" in name for name in tensors)
    for layer in range(layers):
        tensors[f"model.layers.{layer}.self_attn.gate.weight"] = torch.ones(2)
        del tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(3)
    tensors[f"odd.{'9' * 5000}.weight"] = torch.ones(1)  # of which Python makes no integer
    save_file(tensors, llama / "model.safetensors")
    change(llama, architectures=["OddForCausalLM"])
    first, *rest = examine(llama).problems
    assert "architectures=['OddForCausalLM']" in first
    assert rest == [
        "the nearest family is LlamaForCausalLM; beside its tensors the checkpoint",
        "  has: model.layers.*.self_attn.gate.weight, odd.*.weight",
        "  lacks: model.layers.*.mlp.down_proj.weight",
        "  has in other shapes: model.norm.weight",
    ]
    # Of many tensors those of the first layers are compared with all families.
    module = import_module("asyncinfer.models.examine")
    monkeypatch.setattr(module, "MANY_TENSORS", 0)
    monkeypatch.setattr(module, "FIRST_LAYERS", 2)
    assert examine(llama).problems == (first, *rest)
    # An engine names the command that says so, before it looks for a tokenizer.
    (llama / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(ModelLoadError) as caught:
        CheckpointSource(llama).load(EngineConfig(), None)
    assert str(caught.value) == f"{first}. What it would need: asyncinfer models --check {llama}"
    # Without weights the architecture is still what is said first.
    (llama / "model.safetensors").unlink()
    assert examine(llama).problems[0] == first
    assert "neither" in examine(llama).problems[1]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Qwen4ForCausalLM", "Qwen3ForCausalLM"),
        ("Glm5MoeForConditionalGeneration", "Glm4MoeForCausalLM"),
        ("OddForCausalLM", None),
    ],
)
def test_families_with_nearly_the_same_name(name: str, nearest: str | None) -> None:
    with pytest.raises(ModelLoadError, match="none of these is known") as caught:
        find_architecture({"architectures": [name]}, "config.json")
    message = str(caught.value)
    assert ("nearest by name" in message) == (nearest is not None)
    assert nearest is None or nearest in message
    assert len(message) < 300


def test_few_names_are_compared_with_all_families(monkeypatch: pytest.MonkeyPatch) -> None:
    module, compared = import_module("asyncinfer.plugins.architecture"), list[str]()

    def compare(name: str, *_: Any) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr(module, "get_close_matches", compare)
    with pytest.raises(ModelLoadError, match="none of these is known"):
        find_architecture({"architectures": ["OddForCausalLM"] * 100_000}, "config.json")
    assert len(compared) == 8


def test_a_known_architecture_that_lies(llama: Path) -> None:
    change(llama, num_hidden_layers=3)
    (problem,) = examine(llama).problems
    assert "left over" in problem
    change(llama, hidden_size=-1)
    (problem,) = examine(llama).problems
    assert "hidden_size=-1" in problem


@pytest.mark.parametrize("architectures", [None, "LlamaForCausalLM", [3], []])
def test_architectures_that_are_no_names(llama: Path, architectures: Any) -> None:
    change(llama, architectures=architectures)
    assert "architectures=" in examine(llama).problems[0]


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        examine(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    unnamed, none = examine(tmp_path).problems
    assert "architectures=(missing)" in unnamed
    assert "neither" in none
    (tmp_path / "notes.txt").write_text("no JSON")
    with pytest.raises(ModelLoadError, match=r"a folder, a GGUF file or a config\.json"):
        examine(tmp_path / "notes.txt")


def test_a_config_alone(llama: Path) -> None:
    path = llama / "config.json"
    found = examine(path)
    assert found.parameters == examine(llama).parameters
    assert (found.config, found.problems) == (examine(llama).config, ())
    assert "not looked at" in found.notes[0]
    change(llama, architectures=["OddForCausalLM"])
    (problem,) = examine(path).problems
    assert "none of these is known" in problem


def test_a_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(random_model("qwen2", "plain"), tmp_path / "model.gguf")
    found = examine(path)
    assert (found.architectures, found.problems) == (("Qwen2ForCausalLM",), ())
    assert found.config is not None
    assert found.config.num_layers == 2
    broken = write_gguf(
        random_model("qwen2", "plain"), tmp_path / "broken.gguf", **{"qwen2.block_count": 3}
    )
    assert examine(broken).problems == (
        f"file {broken}, tensor blk.2.attn_norm.weight: missing in the checkpoint",
    )
