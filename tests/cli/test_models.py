"""`asyncinfer models`: the list, and a look at one checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncinfer.builtin import DRAFT_PATH
from asyncinfer.cli import main
from asyncinfer.models import GROUPS, NAMED_MODELS
from asyncinfer.plugins import models

Capture = pytest.CaptureFixture[str]


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(["models", *args])
    assert isinstance(done.value.code, int)
    return done.value.code


def test_every_name_and_family_is_listed(capsys: Capture) -> None:
    assert run() == 0
    named, *groups = capsys.readouterr().out.split("\n\nArchitectures: ")
    for model in NAMED_MODELS.values():
        for part in (f"{model.name}  {model.about}", model.licence, model.sha256):
            assert part in named
    heads = [group.splitlines()[0] for group in groups]
    assert heads == [*GROUPS]
    lines = [line for group in groups for line in group.splitlines()[1:]]
    # Each shipped architecture once, with a checkpoint.
    assert sorted(line.split()[0] for line in lines) == sorted(models.names())
    assert all(line.endswith("[built in]") and line.count("/") for line in lines)
    assert run("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["models"]] == list(NAMED_MODELS)
    rows = found["architectures"]
    assert [row["architecture"] for row in rows] == list(models.names())
    assert all(row["summary"] and row["problem"] is None for row in rows)
    assert all(row["group"] in GROUPS and "/" in row["example"] for row in rows)


def test_a_checkpoint_that_can_be_loaded(capsys: Capture) -> None:
    assert run(str(DRAFT_PATH)) == 0
    assert capsys.readouterr().out.startswith("LlamaForCausalLM: can be loaded\n")
    assert run(str(DRAFT_PATH), "--json") == 0
    assert json.loads(capsys.readouterr().out)["supported"] is True


def test_a_checkpoint_that_cannot(tmp_path: Path, capsys: Capture) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((DRAFT_PATH / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["OddForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(str(tmp_path)) == 1
    assert "its tensors are those of LlamaForCausalLM" in capsys.readouterr().out
    assert run(str(tmp_path), "--json") == 1
    assert json.loads(capsys.readouterr().out)["supported"] is False
    assert run(str(tmp_path / "nowhere")) == 1
    assert capsys.readouterr().err.startswith("Error: ")


def test_a_check_needs_a_checkpoint(capsys: Capture) -> None:
    assert run("--check", str(DRAFT_PATH)) == 0
    assert "can be loaded" in capsys.readouterr().out
    assert run("--check") == 2
    assert "--check needs FOLDER" in capsys.readouterr().err
