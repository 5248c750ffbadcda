"""Models of the hub: what cannot be loaded is refused before its weights are fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from weights.hub import Hub

from asyncinfer import ModelLoadError, SyncEngine
from asyncinfer.adapters.files import resolve_adapter
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cli import main

CONFIG: dict[str, Any] = json.loads((MODEL_PATH / "config.json").read_text("utf-8"))
FILES = {
    name: (MODEL_PATH / name).read_bytes()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
}
WRONG: dict[str, tuple[dict[str, bytes | None], str]] = {
    "an unknown architecture": (
        {"config.json": json.dumps({**CONFIG, "architectures": ["KlingonForCausalLM"]}).encode()},
        "KlingonForCausalLM",
    ),
    "a config that cannot be": (
        {"config.json": json.dumps({**CONFIG, "num_hidden_layers": 0}).encode()},
        "num_hidden_layers=0",
    ),
    "no tokenizer": ({"tokenizer.json": None}, "needs its fast tokenizer"),
    "half a tokenizer": ({"tokenizer.json": b'{"model":'}, "not a tokenizer"),
}


@contextmanager
def serving(files: dict[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the environment names, as the client reads it when it is imported."""
    with Hub("org/name", files).serve() as hub:
        address = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        yield hub


@pytest.mark.parametrize("name", WRONG)
def test_no_weights_are_fetched_for_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, says = WRONG[name]
    files = {file: data for file, data in {**FILES, **changes}.items() if data is not None}
    with serving(files, tmp_path, monkeypatch) as hub:
        with pytest.raises(ModelLoadError, match=says), SyncEngine("org/name", device="cpu"):
            pass
    assert sorted(hub.fetched) == sorted(files.keys() - {"model.safetensors"})


@pytest.mark.parametrize("name", ["an unknown architecture", "a config that cannot be"])
@pytest.mark.parametrize("kind", ["pull", "draft"])
def test_none_for_a_pull_and_for_a_draft_either(
    kind: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes, says = WRONG[name]
    files = {file: data for file, data in {**FILES, **changes}.items() if data is not None}
    with serving(files, tmp_path, monkeypatch) as hub:
        if kind == "pull":
            with pytest.raises(SystemExit, match="1"):
                main(["pull", "org/name"])
            assert says in capsys.readouterr().err
        else:
            engine = SyncEngine(MODEL_PATH, device="cpu", draft="org/name")
            with pytest.raises(ModelLoadError, match=says), engine:
                pass
    assert sorted(hub.fetched) == sorted(files.keys() - {"model.safetensors"})


def test_a_drafting_head_is_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100}
    files = {
        "config.json": json.dumps(head).encode(),
        "model.safetensors": FILES["model.safetensors"],
    }
    with serving(files, tmp_path, monkeypatch) as hub:
        with pytest.raises(SystemExit, match="0"):
            main(["pull", "org/name"])
    assert sorted(hub.fetched) == sorted(files)


def test_a_model_of_the_hub_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FILES, tmp_path, monkeypatch) as hub:
        with SyncEngine("org/name", device="cpu") as engine:
            assert len(engine.generate("Once upon", max_tokens=2, ignore_eos=True).token_ids) == 2
    assert sorted(hub.fetched) == sorted(FILES)


def test_an_adapter_of_the_hub_is_there_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"older"}
    with serving(files, tmp_path, monkeypatch):
        older = resolve_adapter("org/name")
    monkeypatch.setattr("weights.hub.COMMIT", "f" * 40)
    files["adapter_model.safetensors"] = b"newer"
    with serving(files, tmp_path, monkeypatch) as hub, monkeypatch.context() as offline:
        newer = resolve_adapter("org/name")
        assert (newer / "adapter_model.safetensors").read_bytes() == b"newer"
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        asked = len(hub.asked)
        assert resolve_adapter("org/name") == newer != older
        assert len(hub.asked) == asked
