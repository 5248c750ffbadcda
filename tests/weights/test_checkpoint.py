"""`SafetensorsCheckpoint`: shards, headers, pickles."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights import Packed, Piece, SafetensorsCheckpoint, WeightLoader, check_weights


def write_raw(path: Path, header: str, data: bytes) -> None:
    encoded = header.encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [start, end]})


def test_reads_headers_then_tensors(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        seen = {name: (t.file, t.shape, t.dtype) for name, t in checkpoint.tensors.items()}
        assert seen == {
            "a": ("model.safetensors", (2, 3), "F32"),
            "b": ("model.safetensors", (4,), "BF16"),
        }
        table = {
            name: Packed((Piece(name, tuple(t.shape)),), str(t.dtype).removeprefix("torch."))
            for name, t in tensors.items()
        }
        loader = WeightLoader(checkpoint, table, torch.device("cpu"), torch.float32, None)
        assert all(torch.equal(loader(name), tensor) for name, tensor in tensors.items())


HEADERS = {  # fault 45: and the tensor that is to blame
    "not json": ("{", None),
    "no object": ("[1]", None),
    "nested": ("[" * 200, None),
    "overlap": (f'{{"a": {entry([1], 0, 4)}, "b": {entry([1], 0, 4)}}}', "b"),
    "hole": (f'{{"a": {entry([1], 4, 8)}}}', "a"),
    "backwards": (f'{{"a": {entry([2], 8, 0)}}}', "a"),
    "past the end": (f'{{"b": {entry([1], 0, 4)}, "a": {entry([3], 4, 16)}}}', "a"),
    "bytes that nobody has": (f'{{"a": {entry([1], 0, 4)}}}', None),
    "shape and bytes differ": (f'{{"b": {entry([1], 0, 4)}, "a": {entry([3], 4, 8)}}}', "a"),
    "overflow": (f'{{"a": {entry([2**62, 2**62], 0, 8)}}}', "a"),
    "negative": (f'{{"a": {entry([-2], 0, 8)}}}', "a"),
    "no number": (f'{{"a": {entry([2], 0, 8).replace("2", "NaN")}}}', "a"),
    "a number that is none": (f'{{"a": {entry([2], 0, 8).replace("2", "true")}}}', "a"),
    "unknown dtype": (f'{{"a": {entry([2], 0, 8, "F33")}}}', "a"),
    "no dtype": ('{"a": {"shape": [2], "data_offsets": [0, 8]}}', "a"),
    "no entry": ('{"a": 5}', "a"),
    "metadata that is none": (f'{{"__metadata__": 5, "a": {entry([2], 0, 8)}}}', None),
    "metadata of numbers": (f'{{"__metadata__": {{"x": 1}}, "a": {entry([2], 0, 8)}}}', None),
    "a name twice": (f'{{"a": {entry([1], 0, 4)}, "a": {entry([1], 4, 8)}}}', "a"),
}


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_headers_that_lie(tmp_path: Path, name: str) -> None:  # fault 45
    header, tensor = HEADERS[name]
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ModelLoadError, match="cannot be read") as caught:
        SafetensorsCheckpoint(tmp_path)
    assert (caught.value.file, caught.value.tensor) == ("model.safetensors", tensor)


def test_a_header_longer_than_its_file(tmp_path: Path) -> None:  # fault 45
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        SafetensorsCheckpoint(tmp_path)


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exit, ("a pickle was run",))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"]
)
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:  # fault 49
    (tmp_path / name).write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ModelLoadError, match="pickled weights are refused") as caught:
        SafetensorsCheckpoint(tmp_path)
    assert caught.value.file == str(tmp_path / name)


def test_a_pickle_under_another_name(tmp_path: Path) -> None:  # fault 49
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ModelLoadError, match="cannot be read"):
        SafetensorsCheckpoint(tmp_path)


def test_a_pickle_beside_safetensors_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["a"]


def test_weights_under_other_names(tmp_path: Path) -> None:
    """Such as a shard whose index was not copied, and Mistral's own file."""
    for name in ("model-00001-of-00002.safetensors", "consolidated.safetensors"):
        (folder := tmp_path / name).mkdir()
        save_file({"a": torch.ones(1)}, folder / name)
        with pytest.raises(ModelLoadError, match=f"other files, such as {name}, are not"):
            SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_clone_without_git_lfs(name: str, tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(ModelLoadError, match=rf"{name}: is a pointer of Git LFS, .*`git lfs pull`"):
        SafetensorsCheckpoint(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        SafetensorsCheckpoint(tmp_path)
    with pytest.raises(ModelLoadError, match="no such folder"):
        SafetensorsCheckpoint(tmp_path / "missing")


def test_pieces_lie_below_each_other(tmp_path: Path) -> None:
    pieces = {"q": torch.randn(4, 3), "k": torch.randn(2, 3), "v": torch.randn(2, 3)}
    save_file(pieces, tmp_path / "model.safetensors")
    qkv = Packed(tuple(Piece(name, tuple(tensor.shape)) for name, tensor in pieces.items()))
    assert qkv.shape == (8, 3)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        check_weights(checkpoint, {"qkv": qkv})
        loader = WeightLoader(checkpoint, {"qkv": qkv}, torch.device("cpu"), torch.float32, None)
        with pytest.raises(AssertionError, match="qkv"):
            loader.finish()
        assert torch.equal(loader("qkv"), torch.cat(list(pieces.values())))
        loader.finish()


def test_a_header_of_a_million_tensors(tmp_path: Path) -> None:  # fault 45
    """It would be read for a minute, into more than a gigabyte."""
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(((16 << 20) + 1).to_bytes(8, "little") + b"{")
        # The rest takes no room on the disk.
        file.truncate(20 << 20)
    with pytest.raises(
        ModelLoadError, match="a header of 16777217 bytes, more than 16777216"
    ) as caught:
        SafetensorsCheckpoint(tmp_path)
    assert caught.value.file == "model.safetensors"


def test_an_index_of_a_million_tensors(tmp_path: Path) -> None:  # fault 45
    with open(tmp_path / "model.safetensors.index.json", "wb") as file:
        file.truncate((32 << 20) + 1)
    with pytest.raises(ModelLoadError, match="33554433 bytes, more than 33554432"):
        SafetensorsCheckpoint(tmp_path)
