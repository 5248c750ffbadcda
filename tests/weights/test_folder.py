"""Which files of a checkpoint's folder may be opened."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from weights.reading import read

from asyncinfer.errors import ModelLoadError
from asyncinfer.files import checkpoint_file, following_links
from asyncinfer.weights import SafetensorsCheckpoint, resolve
from asyncinfer.weights.gguf import GgufCheckpoint

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
OUTSIDE = [  # fault 47
    "../model.safetensors",
    "../../etc/passwd.safetensors",
    "/etc/passwd.safetensors",
    "sub/model.safetensors",
    "..\\model.safetensors",
    "C:\\model.safetensors",
    "C:model.safetensors",
    "./model.safetensors",
    "..",
    "",
    "nul\0.safetensors",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_out(tmp_path: Path, name: str) -> None:  # fault 47
    with pytest.raises(ModelLoadError, match="leads out of the checkpoint's folder"):
        checkpoint_file(tmp_path, name)


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_leads_out(tmp_path: Path, name: str) -> None:  # fault 47
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    # It is there to be read, so that only the refusal keeps it from being read.
    for place in (tmp_path, folder / "sub"):
        save_file({"secret": torch.ones(1)}, place / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"secret": name}}))
    with pytest.raises(ModelLoadError) as caught:
        SafetensorsCheckpoint(folder)
    assert (caught.value.file, caught.value.tensor) == (INDEX, "secret")
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    "index",
    [
        {},
        [],
        {"weight_map": {}},
        {"weight_map": ["a"]},
        {"weight_map": {"a": 5}},
        {"weight_map": {"a": None}},
        {"weight_map": {"a": "pytorch_model.bin"}},
    ],
)
def test_an_index_that_is_none(tmp_path: Path, index: object) -> None:  # fault 45
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=INDEX):
        SafetensorsCheckpoint(tmp_path)


def test_an_index_with_a_key_twice(tmp_path: Path) -> None:  # fault 45
    save_file({"a": torch.ones(1)}, tmp_path / SHARD)
    entry = f'"a": "{SHARD}"'
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{{entry}, {entry}}}}}')
    with pytest.raises(ModelLoadError, match="'a' occurs twice"):
        SafetensorsCheckpoint(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert checkpoint_file(tmp_path, "model.safetensors") is None


def may_not(*_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are not missing: nobody knows. Root may enter any folder."""
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(Path, "lstat", may_not)
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be opened: .*denied"):
        checkpoint_file(tmp_path, "config.json")
    with monkeypatch.context() as patch, pytest.raises(ModelLoadError) as refused:
        patch.setattr(os, "listdir", may_not)
        resolve(tmp_path)
    assert str(refused.value).startswith(f"file {tmp_path}: cannot be opened: ")
    with monkeypatch.context() as patch, pytest.raises(ModelLoadError, match="cannot be opened"):
        patch.setattr(Path, "exists", may_not)
        GgufCheckpoint(tmp_path / "model.gguf")


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot be opened: .*too long"):
        checkpoint_file(tmp_path, "a" * 300)


def test_links_out_of_the_folder(tmp_path: Path) -> None:  # fault 48
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(ModelLoadError, match="is a link out of the checkpoint's folder"):
        SafetensorsCheckpoint(folder)


def test_links_to_what_repositories_of_a_cache_share(tmp_path: Path) -> None:
    """As the hub's client keeps large files since its second version."""
    repository, shared = tmp_path / "models--org--name", tmp_path / "blobs"
    folder = repository / "snapshots" / "c0ffee"
    for each in (folder, repository / "blobs", shared / "ab"):
        each.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, shared / "ab" / "abba")
    (repository / "blobs" / "etag").symlink_to("../../blobs/ab/abba")
    (folder / "model.safetensors").symlink_to("../../blobs/etag")
    with pytest.raises(ModelLoadError, match="is a link out of the checkpoint's folder"):
        SafetensorsCheckpoint(folder)
    (shared / ".huggingface-shared-blobs").write_text("1\n")
    with SafetensorsCheckpoint(folder) as checkpoint:
        assert torch.equal(read(checkpoint, "a"), torch.ones(1))


def test_links_out_of_a_folder_that_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "shared.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "shared.safetensors")
    (folder / "config.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    (folder / "tokenizer.json").symlink_to(tmp_path / "fifo")
    (folder / "generation_config.json").symlink_to(tmp_path / "missing")
    with following_links():
        with SafetensorsCheckpoint(folder) as checkpoint:
            assert torch.equal(read(checkpoint, "a"), torch.ones(1))
        for name in ("config.json", "tokenizer.json"):  # fault 48
            with pytest.raises(ModelLoadError, match="is not a regular file"):
                checkpoint_file(folder, name)
        with pytest.raises(ModelLoadError, match="cannot be opened"):
            checkpoint_file(folder, "generation_config.json")
        with pytest.raises(ModelLoadError, match="leads out"):  # fault 47
            checkpoint_file(folder, "../shared.safetensors")
    with pytest.raises(ModelLoadError, match="follow_symlinks=True"):
        SafetensorsCheckpoint(folder)


def test_links_that_lead_nowhere_or_round_in_circles(tmp_path: Path) -> None:  # fault 48
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("nowhere", "circle"):
        with pytest.raises(ModelLoadError, match="cannot be opened"):
            checkpoint_file(tmp_path, name)


def test_links_inside_the_folder(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "real.safetensors")
    (tmp_path / "model.safetensors").symlink_to("real.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["a"]


def test_a_folder_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "real" / "model.safetensors")
    (tmp_path / "alias").symlink_to("real")
    with SafetensorsCheckpoint(tmp_path / "alias") as checkpoint:
        assert list(checkpoint.tensors) == ["a"]


def hub_cache(root: Path) -> Path:
    """A snapshot as the hub's cache lays it out."""
    repository = root / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    save_file({"a": torch.ones(1)}, repository / "blobs" / "5e1f")
    (snapshot / "model.safetensors").symlink_to("../../blobs/5e1f")
    return snapshot


def test_links_of_the_hub_cache(tmp_path: Path) -> None:  # fault 48
    with SafetensorsCheckpoint(hub_cache(tmp_path)) as checkpoint:
        assert torch.equal(read(checkpoint, "a"), torch.ones(1))


def test_a_blob_that_is_a_link_itself(tmp_path: Path) -> None:  # fault 48
    snapshot = hub_cache(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (snapshot.parent.parent / "blobs" / "evil").symlink_to(tmp_path / "secret.safetensors")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/evil")
    with pytest.raises(ModelLoadError, match="is a link out of the checkpoint's folder"):
        SafetensorsCheckpoint(snapshot)


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
@pytest.mark.parametrize("name", ["model.safetensors", INDEX, SHARD])
def test_what_is_no_regular_file(tmp_path: Path, kind: str, name: str) -> None:  # fault 48
    path = tmp_path / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    if name == SHARD:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": SHARD}}))
    with pytest.raises(ModelLoadError, match=r"is not a regular file|is a link out of"):
        SafetensorsCheckpoint(tmp_path)
