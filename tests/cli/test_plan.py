"""`asyncinfer plan` on a command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planner.configs import CONFIGS
from weights.hub import Hub

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cli import main


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    return str(path)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *args])
    return int(caught.value.code or 0)


def test_prints_what_there_is_to_know(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "--batch", "64", "--context", "512") == 0
    printed = capsys.readouterr().out
    for part in ("8.03 B parameters", "131,072 bytes of KV", "16.06", "4.49", "memory bandwidth"):
        assert part in printed
    rows = [line.split("  ")[0] for line in printed.splitlines()]
    for name in ("bfloat16", "fp8 weights", "int8 weights", "int4 weights", "fp8 KV"):
        assert name in rows


def test_of_a_window_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Mistral-7B-v0.1"]))
    for context, said in (
        ("4096", "131,072 bytes of KV per token, 0.537 GB per sequence"),
        ("32768", "131,072 bytes of KV per token (0 of one more), 0.541 GB per sequence"),
    ):
        assert run(str(path), "--context", context) == 0
        assert said in capsys.readouterr().out


def test_says_when_nothing_fits(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "--gpu", "l4", "--context", "131072") == 0
    assert "not one sequence" in capsys.readouterr().out


def test_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "--json", "--gpu", "h100", "--dtype", "float16") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 8_030_261_248
    assert (found["gpu"]["name"], found["dtype"]) == ("h100-sxm", "float16")
    assert [row["format"] for row in found["formats"]][:2] == ["float16", "fp8 weights"]


def test_a_plot(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "--plot", str(tmp_path / "plan.png")) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert run(config, "--plot", str(tmp_path / "missing" / "plan.png")) == 1
    assert run(config, "--plot", str(tmp_path / "plan.docx")) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith("Error: ") for line in errors)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gpu", "h300"), "must be one of h200, "),
        (("--batch", "0"), "batch=0"),
        (("--context", "1000000"), "between 1 and 131072"),
        (("--dtype", "int3"), "dtype='int3'"),
    ],
)
def test_wrong_options_come_with_the_usage(
    config: str, args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(config, *args) == 2
    err = capsys.readouterr().err
    assert err.startswith("Usage: ")
    assert said in err.splitlines()[-1]


def test_of_a_hub_id_only_the_config_is_fetched(tmp_path: Path) -> None:
    files = {"config.json": json.dumps(CONFIGS["Qwen3-4B"]).encode(), "model.safetensors": b"!"}
    with Hub("org/model", files, token="hf_secret").serve() as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path),
            "HF_TOKEN": "hf_secret",
        }
        command = [sys.executable, "-m", "asyncinfer", "plan", "org/model", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["parameters"] == 4_022_468_096
    assert hub.fetched == ["config.json"]


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "missing")) == 1
    assert capsys.readouterr().err.startswith("Error: model ")


def test_the_model_that_ships_with_the_package_has_a_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (["embedded"], [str(MODEL_PATH), "--draft", "embedded"]):
        assert run(*arguments) == 0
        assert "parameters" in capsys.readouterr().out
