"""Corrupted and lying checkpoints, made from the shipped model: every one is refused with the file
and the tensor named, before any memory is taken for a weight, and nothing stays open."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from weights.corruptions import CORRUPTIONS, Corruption, single, split

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import load_model
from asyncinfer.weights import WeightLoader

#: Of each kind so many, at places of their own.
SEEDS = (1, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A copy of the shipped model, not kept after the test."""
    copy = tmp_path / "model"
    shutil.copytree(MODEL_PATH, copy)
    yield copy
    shutil.rmtree(tmp_path)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_it_is_refused(
    folder: Path, corrupt: Corruption, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fault 45, 47, 48, 49
    taken: list[str] = []
    monkeypatch.setattr(WeightLoader, "__call__", lambda self, name: taken.append(name))
    file, tensor = corrupt(folder, Random(f"{corrupt.__name__} {seed}"))
    before = open_files()
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder, "cpu", torch.float32)
    error = caught.value
    assert Path(error.file or "").name == Path(file).name
    assert error.tensor == tensor
    assert file in str(error)
    assert tensor is None or tensor in str(error)
    assert not taken
    del caught, error
    assert open_files() == before


def test_what_is_whole_is_not_refused(folder: Path) -> None:
    """Nothing but the corruption is what is refused."""
    load_model(folder, "cpu", torch.float32)
    single(folder).write()
    load_model(folder, "cpu", torch.float32)
    split(folder)
    load_model(folder, "cpu", torch.float32)


def test_any_byte_of_a_header(tmp_path: Path) -> None:
    """Whatever byte of a header is another: it is refused as a broken checkpoint is, or means what
    it meant."""
    from safetensors.torch import save_file

    from asyncinfer.weights import Packed, Piece, SafetensorsCheckpoint, check_weights

    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    table = {name: Packed((Piece(name, tuple(t.shape)),)) for name, t in tensors.items()}
    random, refused, read = Random(0), 0, 0
    for place in range(header):
        changed = bytearray(whole)
        changed[place] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
        try:
            with SafetensorsCheckpoint(tmp_path) as checkpoint:
                check_weights(checkpoint, table)
                cpu = torch.device("cpu")
                loader = WeightLoader(checkpoint, table, cpu, torch.float32, None)
                for name, tensor in tensors.items():
                    assert torch.equal(loader(name), tensor)
        except ModelLoadError:
            refused += 1
        else:
            read += 1
    assert refused > 10 * read > 0
