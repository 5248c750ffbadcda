"""A model that is whole in the hub's cache stays so: a newer one at the hub takes its place only
when it is whole, too."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save
from weights.hub import Hub

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights import hub as hub_module
from asyncinfer.weights import resolve, resolve_config

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors": save({"w": torch.ones(2)}),
}


class Left(Exception):
    """Whoever wanted a model has gone."""


def fetched(cache: Path, files: dict[str, bytes] = FILES) -> Path:
    with Hub("org/name", files).serve() as hub:
        return resolve("org/name", cache_dir=cache, endpoint=hub.url)


def test_a_newer_commit_that_breaks_off_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is whole stays so, for whoever is offline, until the newer commit is whole, too."""
    offline = partial(resolve, "org/name", cache_dir=tmp_path, offline=True)
    older = fetched(tmp_path)
    monkeypatch.setattr("weights.hub.COMMIT", "f" * 40)
    with Hub("org/name", {**FILES, "config.json": b'{"new": 1}'}).serve() as hub:

        def refuse(folder: Path) -> None:
            assert folder.name == "f" * 40
            raise Left

        with pytest.raises(Left):
            resolve("org/name", cache_dir=tmp_path, endpoint=hub.url, check=refuse)
        assert offline() == older
        newest = resolve_config("org/name", cache_dir=tmp_path, endpoint=hub.url)
        assert json.loads(newest.read_text()) == {"new": 1}
        assert offline() == older
        newer = resolve("org/name", cache_dir=tmp_path, endpoint=hub.url)
        assert offline() == newer == newest.parent


@pytest.mark.parametrize(
    "cause",
    [
        OSError(28, "No space left on device"),
        PermissionError(13, ""),
        RuntimeError("[Errno 28] of Xet: No space left on device (os error 28)"),
    ],
)
def test_a_cache_that_keeps_nothing_more(
    cause: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cache in a container's image, when the hub has a newer commit."""

    def refuse(*args: Any, **options: Any) -> str:
        raise cause

    told: list[str] = []
    monkeypatch.setattr(hub_module, "emit", lambda event, **more: told.append(event))
    older = fetched(tmp_path)
    file = fetched(tmp_path / "gguf", {"a.Q4_0.gguf": b"GGUF"})
    monkeypatch.setattr("weights.hub.COMMIT", "f" * 40)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with Hub("org/name", FILES).serve() as hub:
        take = partial(resolve, "org/name", endpoint=hub.url)
        assert take(cache_dir=tmp_path) == older
        config = resolve_config("org/name", cache_dir=tmp_path, endpoint=hub.url)
        assert config == older / "config.json"
        for wanted in (resolve, resolve_config):
            with pytest.raises(ModelLoadError, match=r"org/name: cannot be kept in .*/empty\): \["):
                wanted("org/name", cache_dir=tmp_path / "empty", endpoint=hub.url)
    with Hub("org/name", {"a.Q4_0.gguf": b"GGUF2"}).serve() as hub:
        assert resolve("org/name", cache_dir=tmp_path / "gguf", endpoint=hub.url) == file
    assert [name for name in told if name != "hub_silent"] == ["hub_unreachable"] * 3
