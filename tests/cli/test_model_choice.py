"""Which model a command takes: by name, by the environment, or the embedded one for want of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import heed_ctrl_c
from weights.hub import Hub

import asyncinfer.models
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cli import main
from asyncinfer.cli.model import with_model
from asyncinfer.errors import ModelLoadError

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is here, and what is pulled is noted."""
    names: list[str] = []
    monkeypatch.delenv("ASYNCINFER_MODEL")
    monkeypatch.setattr(asyncinfer.models, "pulled", lambda model: None)
    monkeypatch.setattr(
        asyncinfer.models, "pull", lambda model, **options: names.append(model.name)
    )
    return names


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch, fetched: list[str]) -> None:
    def refuse(model: Any, **options: Any) -> Path:
        raise ModelLoadError(f"model {model.name!r} can be had nowhere")

    monkeypatch.setattr(asyncinfer.models, "pull", refuse)


def test_without_a_name_smollm2_is_fetched_once(fetched: list[str], capsys: Capture) -> None:
    assert with_model({"device": "cpu"}) == {"device": "cpu", "model": "smollm2"}
    assert fetched == ["smollm2"]
    said = capsys.readouterr()
    assert said.err == "Fetching smollm2 (98 MB, Apache-2.0) ...\n"
    assert not said.out


def test_what_is_here_is_not_fetched(
    fetched: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(asyncinfer.models, "pulled", lambda model: Path("here"))
    assert with_model({}) == {"model": "smollm2"}
    assert not fetched
    assert not capsys.readouterr().err


def test_the_working_directory_has_no_say_in_what_is_taken_without_a_name(
    fetched: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asyncinfer.models, "pulled", lambda model: Path("/cache/smollm2.gguf"))
    assert with_model({}) == {"model": str(Path("/cache/smollm2.gguf"))}
    assert with_model({"model": "smollm2"}) == {"model": "smollm2"}


@pytest.mark.usefixtures("unreachable")
def test_where_nothing_can_be_reached_the_embedded_model_is_taken(capsys: Capture) -> None:
    assert with_model({}) == {}
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == [
        "model 'smollm2' can be had nowhere. Taking the embedded model instead: it completes "
        "Python code, and is no assistant."
    ]


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize(("options", "tokens"), [((), 48), (("--max-tokens", "7"), 7)])
def test_the_embedded_model_answers_in_its_place_and_ends(
    options: tuple[str, ...], tokens: int, capsys: Capture
) -> None:
    question = "What is the capital of France?"
    assert run("chat", "--device", "cpu", *options, question) == 0
    said = capsys.readouterr()
    assert "Taking the embedded model instead" in said.err
    # A token has sixteen letters at most, or little more.
    assert 0 < len(said.out.strip()) <= 16 * tokens


@pytest.mark.usefixtures("unreachable")
def test_a_model_that_was_asked_for_is_not_replaced() -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        with_model({"model": "smollm2"})


@pytest.mark.parametrize(
    ("given", "variable", "taken"),
    [
        ({"model": "a/b"}, "c/d", {"model": "a/b"}),
        ({}, "c/d", {"model": "c/d"}),
        ({"model": "embedded"}, None, {"model": "embedded"}),
        ({}, "embedded", {"model": "embedded"}),
    ],
)
def test_the_option_goes_before_the_environment(
    given: dict[str, str],
    variable: str | None,
    taken: dict[str, str],
    fetched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("ASYNCINFER_MODEL", variable)
    assert with_model(given) == taken
    assert not fetched


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert isinstance(done.value.code, int)
    return done.value.code


def test_an_empty_name_is_that_of_no_model(capsys: Capture) -> None:
    """Such as that of a shell's variable that is not set."""
    assert run("generate", "hello", "--model", "") == 1
    assert "model '': no such folder" in capsys.readouterr().err


def test_pull_prints_where_the_model_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    asked: list[Any] = []

    def noted(answer: Path) -> Callable[..., Path]:
        def pull(model: Any, **options: Any) -> Path:
            asked.append(model)
            return answer

        return pull

    monkeypatch.setattr(asyncinfer.models, "pull", noted(tmp_path / "named"))
    monkeypatch.setattr(asyncinfer.models, "resolve", noted(tmp_path / "hub"))
    assert run("pull", "smollm2") == 0
    assert run("pull", "org/name:Q4_K_M") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'named'}\n{tmp_path / 'hub'}\n"
    assert [getattr(one, "name", one) for one in asked] == ["smollm2", "org/name:Q4_K_M"]


def test_sigterm_ends_a_pull_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an exception, so that what has come of a file is removed."""
    monkeypatch.setattr(
        asyncinfer.models, "resolve", lambda *_, **__: signal.raise_signal(signal.SIGTERM)
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run("pull", "org/name") == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_while_the_hub_says_nothing_more(tmp_path: Path) -> None:
    """The hub's client waits for a minute. The first Ctrl-C says so, the second ends at once."""
    begun, ended = threading.Event(), threading.Event()
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    files = {name: (MODEL_PATH / name).read_bytes() for name in names}

    def part(name: str) -> None:
        if name == "model.safetensors":
            begun.set()
            ended.wait(120)

    with Hub("org/name", files, part=part).serve() as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path)}
        with subprocess.Popen(
            [sys.executable, "-m", "asyncinfer", "pull", "org/name"],
            env={**os.environ, **settings},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_ctrl_c,
        ) as program:
            try:
                assert program.stderr is not None
                assert begun.wait(120)
                program.send_signal(signal.SIGINT)
                assert any("Ctrl-C once more" in line for line in program.stderr)
                program.send_signal(signal.SIGINT)
                assert "Traceback" not in program.stderr.read()
                assert program.wait() == -signal.SIGINT
            finally:
                ended.set()
                program.kill()


def test_one_message_is_answered_and_the_program_ends(capsys: Capture) -> None:
    assert run("chat", "--max-tokens", "5", "Say something") == 0
    assert len(capsys.readouterr().out.strip()) > 0
