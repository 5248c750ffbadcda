"""`WeightLoader`: what it reads is what the shards hold, and nobody is left behind."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights import LoadProgress, Packed, Piece, SafetensorsCheckpoint, WeightLoader
from asyncinfer.weights import loader as loader_module
from asyncinfer.weights.safetensors_file import SafetensorsReader

SHAPES = {"q": (40, 24), "k": (8, 24), "v": (8, 24), "norm": (24,), "experts": (3, 10, 24)}
TABLE = {
    "qkv": Packed(tuple(Piece(name, SHAPES[name]) for name in "qkv")),
    "norm": Packed((Piece("norm", SHAPES["norm"]),)),
    "experts": Packed((Piece("experts", SHAPES["experts"]),), "float32"),
}
CPU = torch.device("cpu")


def write(folder: Path, stored: torch.dtype) -> None:
    """One file for each tensor, so that reads of one packed tensor go to several."""
    weight_map = {name: f"{name}.safetensors" for name in SHAPES}
    for name, shape in SHAPES.items():
        save_file({name: torch.randn(shape).to(stored)}, folder / weight_map[name])
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def library(folder: Path, name: str) -> torch.Tensor:
    """The tensor as safetensors reads it."""
    return load_file(folder / f"{name}.safetensors")[name]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [one for one in threading.enumerate() if one.name.startswith("asyncinfer-load")]


@pytest.mark.parametrize("chunk", [4, 64, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_as_the_library_reads_them(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype, chunk: int
) -> None:
    write(tmp_path, stored)
    seen: list[LoadProgress] = []
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        loader = WeightLoader(checkpoint, TABLE, CPU, dtype, seen.append, chunk=chunk)
        for name, packed in TABLE.items():
            plain = torch.cat([library(tmp_path, piece.name) for piece in packed.pieces])
            found = loader(name)
            assert found.dtype is packed.held_in(dtype)
            assert torch.equal(found, plain.to(found.dtype))
        loader.finish()
    done = [step.bytes_done for step in seen]
    total = sum(math.prod(shape) for shape in SHAPES.values()) * stored.itemsize
    assert (done[0], done[-1]) == (0, total)
    assert done == sorted(set(done))
    # It is told of each chunk.
    steps = [after - before for before, after in pairwise(done)]
    assert max(steps) <= chunk
    assert {step.bytes_total for step in seen} == {total}
    assert {step.tensor for step in seen[1:]} == set(SHAPES)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The buffers that are made."""
    buffers: list[Any] = []

    class Counted(loader_module.HostBuffer):
        def __init__(self, size: int, device: torch.device) -> None:
            super().__init__(size, device)
            buffers.append(self)

    monkeypatch.setattr(loader_module, "HostBuffer", Counted)
    return buffers


def test_what_is_on_the_host_is_bounded(tmp_path: Path, made: list[Any]) -> None:
    write(tmp_path, torch.float32)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        loader = WeightLoader(checkpoint, TABLE, CPU, torch.bfloat16, None, chunk=64)
        for name in TABLE:
            loader(name)
        assert 0 < len(made) <= checkpoint.reader.threads + 1
    assert {buffer.memory.nbytes for buffer in made} == {64}


def test_no_buffer_is_written_to_before_its_copy_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU copies when it gets to it; here it never does before somebody waits."""
    waited: list[int] = []

    class Slow(loader_module.HostBuffer):
        copying: tuple[Any, torch.Tensor] | None = None

        def copy(self, chunk: Any) -> None:
            assert self.copying is None
            self.copying = chunk, self.memory[: chunk.size].view(chunk.stored)

        def ready(self) -> bool:
            return self.copying is None

        def wait(self) -> None:
            if self.copying is not None:
                chunk, source = self.copying
                chunk.target.copy_(source)
                waited.append(chunk.size)
                self.copying = None

    monkeypatch.setattr(loader_module, "HostBuffer", Slow)
    write(tmp_path, torch.float32)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        loader = WeightLoader(checkpoint, TABLE, CPU, torch.bfloat16, None, chunk=64)
        found = {name: loader(name) for name in TABLE}
        for buffer in loader.buffers:
            buffer.wait()
        for name, packed in TABLE.items():
            plain = torch.cat([library(tmp_path, piece.name) for piece in packed.pieces])
            # What stays float32 goes as it is.
            assert torch.equal(found[name], plain.to(found[name].dtype))
    through = sum(math.prod(SHAPES[name]) for name in ("q", "k", "v", "norm"))
    assert sum(waited) == 4 * through


def test_a_pinned_buffer_waits_for_its_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's buffers do, with events that are reached when somebody waits for them."""

    class Event:
        done = True

        def record(self, stream: object) -> None:
            assert stream == "the stream of cpu"
            self.done = False

        def query(self) -> bool:
            return self.done

        def synchronize(self) -> None:
            self.done = True

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return torch.zeros(size, dtype=dtype)

    made: list[Any] = []

    class Pinned(loader_module.HostBuffer):
        def __init__(self, size: int, device: torch.device) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", empty)
                super().__init__(size, torch.device("cuda"))
            made.append(self)

        def copy(self, chunk: Any) -> None:
            assert isinstance(self._copied, Event)
            assert self._copied.done, "filled anew while it was copied"
            super().copy(chunk)
            assert not self._copied.done

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(loader_module, "HostBuffer", Pinned)
    write(tmp_path, torch.float32)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        loader = WeightLoader(checkpoint, TABLE, CPU, torch.bfloat16, None, chunk=64)
        for name, packed in TABLE.items():
            plain = torch.cat([library(tmp_path, piece.name) for piece in packed.pieces])
            found = loader(name)
            assert torch.equal(found, plain.to(found.dtype))
        assert len(made) == checkpoint.reader.threads + 1


def test_no_buffer_where_bytes_go_as_they_are(tmp_path: Path, made: list[Any]) -> None:
    write(tmp_path, torch.float32)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        loader = WeightLoader(checkpoint, TABLE, CPU, torch.float32, None, chunk=64)
        for name in TABLE:
            loader(name)
    assert made == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_that_is_cut_short_while_it_is_read(
    tmp_path: Path, dtype: torch.dtype
) -> None:  # fault 45
    """A mapped file would end the process here."""
    write(tmp_path, torch.float32)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        loader = WeightLoader(checkpoint, TABLE, CPU, dtype, None, chunk=64)
        path = tmp_path / "k.safetensors"
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(ModelLoadError, match="cut short") as caught:
            loader("qkv")
    assert (caught.value.file, caught.value.tensor) == ("k.safetensors", "k")


def test_progress_that_raises_stops_the_threads(tmp_path: Path) -> None:
    write(tmp_path, torch.float32)

    def stop(step: LoadProgress) -> None:
        if step.bytes_done >= 256:
            raise InterruptedError("enough")

    read: list[int] = []

    class Watched(SafetensorsReader):
        def read(self, file: str, tensor: str, offset: int, target: memoryview) -> None:
            super().read(file, tensor, offset, target)
            read.append(len(target))

    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        checkpoint.reader.__class__ = Watched
        loader = WeightLoader(checkpoint, TABLE, CPU, torch.float32, stop, chunk=64)
        with pytest.raises(InterruptedError, match="enough"):
            loader("qkv")
        # What was told, and what was under way.
        assert 256 <= sum(read) <= 256 + 64 * (checkpoint.reader.threads + 1)


def test_without_reads_at_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every system has them."""
    monkeypatch.delattr(os, "preadv")
    write(tmp_path, torch.bfloat16)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        loader = WeightLoader(checkpoint, TABLE, CPU, torch.float32, None, chunk=64)
        plain = torch.cat([library(tmp_path, name) for name in "qkv"])
        assert torch.equal(loader("qkv"), plain.float())


HEADERS = {  # fault 45
    "shorter than a length": b"\0\0\0",
    "longer than the file": (1 << 60).to_bytes(8, "little") + b"{}",
    "not JSON": (2).to_bytes(8, "little") + b"{]",
    "no object": (2).to_bytes(8, "little") + b"[]",
    "no offsets": (8).to_bytes(8, "little") + b'{"a":{}}',
    "behind the end": (31).to_bytes(8, "little") + b'{"a":{"data_offsets":[   0,9]}}' + b"1234",
    "no number": (31).to_bytes(8, "little") + b'{"a":{"data_offsets":[0.0,9]}} ' + b"1234",
    "nested": (1 << 20).to_bytes(8, "little") + b"[" * (1 << 20),
}


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_a_header_that_is_not_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HEADERS[name])
    with closing(SafetensorsReader()) as reader:
        with pytest.raises(ModelLoadError, match="cannot be read") as caught:
            reader.open("model.safetensors", path)
    assert caught.value.file == "model.safetensors"


def test_a_device_is_not_read(tmp_path: Path) -> None:  # fault 48
    with closing(SafetensorsReader()) as reader:
        with pytest.raises(ModelLoadError, match="is not a regular file"):
            reader.open("zero", Path("/dev/zero"))


def test_a_file_that_shrank(tmp_path: Path) -> None:  # fault 45
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4)}, path)
    with closing(SafetensorsReader()) as reader:
        reader.open("a", path)
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(ModelLoadError, match="the file ends within it") as caught:
            reader.read("a", "a", 0, memoryview(bytearray(16)))
    assert (caught.value.file, caught.value.tensor) == ("a", "a")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onto_a_gpu(tmp_path: Path, dtype: torch.dtype) -> None:
    write(tmp_path, torch.bfloat16)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        loader = WeightLoader(checkpoint, TABLE, torch.device("cuda"), dtype, None, chunk=64)
        for name, packed in TABLE.items():
            plain = torch.cat([library(tmp_path, piece.name) for piece in packed.pieces])
            assert torch.equal(loader(name).cpu(), plain.to(packed.held_in(dtype)))
