"""`resolve`: folders, and hub ids against a hub on localhost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from weights.hub import COMMIT, Hub
from weights.reading import read

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights import SafetensorsCheckpoint, resolve, resolve_config

INDEX = "model.safetensors.index.json"
# Contents differ, or the cache would keep one blob for all.
TOKENIZER = {
    name: json.dumps(name).encode()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
}
NEVER = {
    "README.md": b"hello",
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"another copy",
    "onnx/model.onnx": b"onnx",
}


def shard(value: float) -> bytes:
    return save({f"w{value:g}": torch.full((2,), value)})


@pytest.fixture
def single() -> Iterator[Hub]:
    files = {**TOKENIZER, **NEVER, "model.safetensors": shard(1)}
    with Hub("org/single", files).serve() as hub:
        yield hub


def test_a_folder_stays_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *("./missing", "/missing", "/missing/model", "~/missing", "a/b/c", "../x"),
        *("~a-user-of-another-machine/x", "C:\\models\\x", "C:/models/x"),
        *("", "a b", "nul\0", "-x", "a/b..c", "a/b--c", "ö/x", "a/" + "b" * 96),
    ],
)
def test_neither_folder_nor_hub_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"^model .*(no such folder|cannot be opened)"):
        resolve(name)


@pytest.mark.parametrize("take", [resolve, resolve_config])
def test_an_address_is_no_hub_id(take: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"model 'https://hub/org/name' is an address; .* id"):
        take("https://hub/org/name", offline=True, cache_dir=tmp_path)


def test_a_missing_path_is_never_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        resolve(Path("org/name"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve(tmp_path / "file")


@pytest.mark.parametrize("name", ["./missing.gguf", "/missing/model.gguf", "missing.GGUF"])
def test_a_missing_gguf_file_is_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="no such file"):
        resolve(name, offline=True, cache_dir=tmp_path)


def test_downloads_what_it_needs_and_no_more(
    single: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    take = partial(resolve, "org/single", cache_dir=tmp_path, endpoint=single.url)
    folder = take()
    assert folder.name == COMMIT
    assert sorted(single.fetched) == sorted([*TOKENIZER, "model.safetensors"])
    with SafetensorsCheckpoint(folder) as checkpoint:  # fault 48: the cache's own links work
        assert torch.equal(read(checkpoint, "w1"), torch.ones(2))
    assert (folder / "model.safetensors").is_symlink()
    single.fetched.clear()
    assert take() == folder
    assert take(revision=COMMIT) == folder
    assert take(offline=True) == folder
    assert single.fetched == []
    assert capfd.readouterr() == ("", "")


def test_shards_of_the_index(tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"w1": names[0], "w2": names[1]}}
    files = {
        **TOKENIZER,
        INDEX: json.dumps(index).encode(),
        names[0]: shard(1),
        names[1]: shard(2),
        "model-00003-of-00003.safetensors": shard(3),
        **NEVER,
    }
    with Hub("org/sharded", files).serve() as hub:
        folder = resolve("org/sharded", cache_dir=tmp_path, endpoint=hub.url)
    assert sorted(hub.fetched) == sorted([*TOKENIZER, INDEX, *names])
    with SafetensorsCheckpoint(folder) as checkpoint:
        assert sorted(checkpoint.tensors) == ["w1", "w2"]


def test_an_index_that_leads_out_fetches_nothing_more(tmp_path: Path) -> None:  # fault 47
    index = {"weight_map": {"w1": "../../evil.safetensors"}}
    files = {"config.json": b"{}", INDEX: json.dumps(index).encode()}
    with Hub("org/evil", files).serve() as hub:
        with pytest.raises(ModelLoadError, match="leads out of the folder"):
            resolve("org/evil", cache_dir=tmp_path, endpoint=hub.url)
    assert sorted(hub.fetched) == sorted(files)


def test_what_the_hub_does_not_have(single: Hub, tmp_path: Path) -> None:
    take = partial(resolve, cache_dir=tmp_path, endpoint=single.url)
    with pytest.raises(ModelLoadError, match="cannot be had from the hub") as caught:
        take("org/other")
    says = str(caught.value)
    for part in ("model 'org/other'", "no such folder", single.url, "no such model", "HF_TOKEN"):
        assert part in says
    assert not says.startswith("file ")
    with pytest.raises(ModelLoadError, match="at revision v9"):
        take("org/single", revision="v9")
    with pytest.raises(ModelLoadError, match="cannot be had from the hub"):
        take("org/single", offline=True)


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (451, "451 Unavailable For Legal Reasons"),
        (401, r"it refuses the token that it was given \(HF_TOKEN, or that of `hf auth login`\)"),
    ],
)
def test_what_the_hub_says_when_it_gives_no_file(
    status: int, why: str, single: Hub, tmp_path: Path
) -> None:
    """The client says of every such answer that the connection is to be checked."""
    single.status = status
    with pytest.raises(ModelLoadError, match=why) as caught:
        resolve("org/single", cache_dir=tmp_path, endpoint=single.url)
    assert "cannot be reached" not in str(caught.value)


def test_a_hub_that_cannot_be_reached(single: Hub, tmp_path: Path) -> None:
    folder = resolve("org/single", cache_dir=tmp_path, endpoint=single.url)
    nowhere = "http://127.0.0.1:1"
    assert resolve("org/single", cache_dir=tmp_path, endpoint=nowhere) == folder
    with pytest.raises(ModelLoadError, match="cannot be had from the hub"):
        resolve("org/other", cache_dir=tmp_path, endpoint=nowhere)


def test_the_config_alone(single: Hub, tmp_path: Path) -> None:
    take = partial(resolve_config, "org/single", cache_dir=tmp_path, endpoint=single.url)
    path = take()
    assert path.read_bytes() == TOKENIZER["config.json"]
    assert single.fetched == ["config.json"]
    assert take(offline=True) == path
    # A cache with the config alone is not the model.
    with pytest.raises(ModelLoadError, match=r"does not have its|is incomplete"):
        resolve("org/single", cache_dir=tmp_path, endpoint=single.url, offline=True)
    with pytest.raises(ModelLoadError, match="cannot be had from the hub"):
        resolve_config("org/other", cache_dir=tmp_path, endpoint=single.url)


def test_a_repository_without_safetensors(tmp_path: Path) -> None:  # fault 49
    for name, says in (
        ("pytorch_model.bin", "file org/x/pytorch_model.bin: pickled weights are refused"),
        ("consolidated.safetensors", "in it; other files, such as consolidated.safetensors,"),
        ("flax_model.msgpack", "neither model.safetensors nor model.safetensors.index.json in it"),
    ):
        with Hub("org/x", {**TOKENIZER, name: b"weights"}).serve() as hub:
            with pytest.raises(ModelLoadError, match=says.replace(".", r"\.")):
                resolve("org/x", cache_dir=tmp_path, endpoint=hub.url)
        assert not hub.fetched


def test_the_config_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ModelLoadError, match="no such file"):
        resolve_config(tmp_path)
    path.write_text("{}")
    assert resolve_config(tmp_path) == resolve_config(str(path)) == path


@pytest.mark.parametrize("take", [resolve, resolve_config])
def test_what_is_neither_folder_nor_file(take: Any, tmp_path: Path) -> None:  # fault 48
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelLoadError, match="neither a folder nor a regular file"):
        take(tmp_path / "config.json")


def test_a_branch_a_tag_a_commit(tmp_path: Path) -> None:
    files = {**TOKENIZER, "model.safetensors": shard(1)}
    with Hub("org/single", files, branches=("main", "v1.0")).serve() as hub:
        take = partial(resolve, "org/single", cache_dir=tmp_path, endpoint=hub.url)
        folder = take(revision="v1.0")
        assert folder.name == COMMIT
        hub.fetched.clear()
        # What the cache knows under one name it need not fetch under another.
        assert take(revision=COMMIT) == take() == folder
        assert hub.fetched == []
    # Each name is remembered without the hub.
    assert take(revision="v1.0", offline=True) == folder
    with pytest.raises(ModelLoadError, match="at revision v2"):
        take(revision="v2.0", offline=True)


def test_a_private_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is the one that the hub's own client knows."""
    files = {**TOKENIZER, "model.safetensors": shard(1)}
    with Hub("org/private", files, token="hf_secret").serve() as hub:
        take = partial(resolve, "org/private", cache_dir=tmp_path, endpoint=hub.url)
        for token in ("", "hf_wrong"):
            monkeypatch.setenv("HF_TOKEN", token)
            with pytest.raises(ModelLoadError, match="cannot be had from the hub") as caught:
                take()
            assert "hf_" not in str(caught.value)
        assert hub.fetched == []
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        with SafetensorsCheckpoint(take()) as checkpoint:
            assert torch.equal(read(checkpoint, "w1"), torch.ones(2))
        assert sorted(hub.fetched) == sorted(files)


@pytest.mark.slow
def test_the_clients_own_variables(tmp_path: Path) -> None:
    """Where to, whose and whether at all is the environment's to say."""
    files = {**TOKENIZER, "model.safetensors": shard(1)}
    program = "from asyncinfer.weights import resolve; print(resolve('org/private'))"
    plain = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}

    def run(**variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**plain, "HF_HOME": str(tmp_path), **variables},
            capture_output=True,
            text=True,
            timeout=240,
        )
        return done.stdout.strip() or done.stderr

    with Hub("org/private", files, token="hf_secret").serve() as hub:
        folder = run(HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
        assert folder == str(tmp_path / f"hub/models--org--private/snapshots/{COMMIT}")
        assert sorted(hub.fetched) == sorted(files)
        hub.fetched.clear()
        hub.asked.clear()
        assert run(HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1") == folder
        assert hub.asked == []


def test_a_name_that_is_spelt_nearly_right(single: Hub, tmp_path: Path) -> None:
    for name, told in (("smolm2", "lists; did you mean smollm2?"), ("org/smolm2", "lists")):
        with pytest.raises(ModelLoadError) as caught:
            resolve(name, cache_dir=tmp_path, endpoint=single.url)
        assert str(caught.value).endswith(told)


def test_a_name_goes_without_a_revision(single: Hub, tmp_path: Path) -> None:
    """With one it is an id on the hub; it was told that `smollm2` was meant."""
    with pytest.raises(ModelLoadError, match=r"lists; the name smollm2 goes without a revision$"):
        resolve("smollm2", revision="main", cache_dir=tmp_path, endpoint=single.url)
