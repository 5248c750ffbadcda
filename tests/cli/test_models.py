"""`asyncinfer models`: the list, and a look at one checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
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
    shipped, *_ = capsys.readouterr().out.split("\n\nArchitectures of other packages\n")
    named, *groups = shipped.split("\n\nArchitectures: ")
    for model in NAMED_MODELS.values():
        for part in (f"{model.name}  {model.about}", model.licence, model.sha256):
            assert part in named
    heads = [group.splitlines()[0] for group in groups]
    assert heads == [*GROUPS]
    lines = [line for group in groups for line in group.splitlines()[1:]]
    # Each shipped architecture once, with a checkpoint.
    built_in = [name for name in models.names() if models.is_built_in(name)]
    assert sorted(line.split()[0] for line in lines) == sorted(built_in)
    assert all(line.endswith("[built in]") and line.count("/") for line in lines)
    assert run("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["models"]] == list(NAMED_MODELS)
    rows = found["architectures"]
    assert [row["architecture"] for row in rows] == list(models.names())
    assert all(row["summary"] and row["problem"] is None for row in rows)
    ours = [row for row in rows if row["architecture"] in built_in]
    assert all(row["group"] in GROUPS and "/" in row["example"] for row in ours)


def test_a_checkpoint_that_can_be_loaded(capsys: Capture) -> None:
    assert run(str(DRAFT_PATH)) == 0
    assert capsys.readouterr().out.startswith("LlamaForCausalLM: can be loaded\n")
    assert run(str(DRAFT_PATH), "--json") == 0
    assert json.loads(capsys.readouterr().out)["supported"] is True


def test_a_model_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("embedded") == 0
    assert capsys.readouterr().out.startswith("LlamaForCausalLM: can be loaded\n")
    for here in (None, DRAFT_PATH):
        monkeypatch.setattr("asyncinfer.cli.models.pulled", lambda model, here=here: here)
        assert run("smollm2") == (1 if here is None else 0)
        told = capsys.readouterr()
        assert ("asyncinfer pull smollm2" in told.err) is (here is None)
    # What is called so in the working directory comes first.
    (tmp_path / "smollm2").mkdir()
    assert run("smollm2") == 1
    assert "config.json" in capsys.readouterr().err


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


def test_nobody_waits_for_torch(tmp_path: Path) -> None:
    """Which takes longer to import than all else that the command does. What uses torch when it is
    imported undoes this. An engine that refuses the checkpoint does not import it either."""
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "model.safetensors").write_bytes((DRAFT_PATH / "model.safetensors").read_bytes())
    config = json.loads((DRAFT_PATH / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "architectures": ["OddForCausalLM"]}))
    program = """
import asyncio, sys
from asyncinfer import Engine, ModelLoadError
from asyncinfer.cli import main
async def refused():
    try:
        async with Engine("odd"):
            pass
    except ModelLoadError as error:
        assert "none of these is known" in str(error)
    else:
        raise AssertionError("it was opened")
asyncio.run(refused())
assert "torch" not in sys.modules
for code, *args in (0,), (1, "--check", "odd"):
    try:
        main(["models", *args])
    except SystemExit as end:
        assert end.code == code
assert "torch._C" not in sys.modules
import torch, torch.nn.functional as F
assert F.relu(torch.tensor([-1.0, 2.0])).sum() == 2
import torch as now
assert type(now) is type(sys) and now.Tensor is torch.Tensor
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_check_needs_a_checkpoint(capsys: Capture) -> None:
    assert run("--check", str(DRAFT_PATH)) == 0
    assert "can be loaded" in capsys.readouterr().out
    assert run("--check") == 2
    assert "--check needs FOLDER" in capsys.readouterr().err
