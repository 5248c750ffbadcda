"""Copies of weights in the layout of a CPU's layers: the same bits as without, and what is no copy
of theirs."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from models.checkpoints import Sequences
from models.families import FAMILIES, SMALL, random_model, randomised
from models.gguf_files import write_gguf
from safetensors import safe_open
from transformers import AutoConfig

from asyncinfer import SyncEngine
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels import kept, onednn, onednn_memory
from asyncinfer.models import Decoder, load_model
from asyncinfer.quantization import BlockWeight, ReorderedWeight, StackedWeight, reordered
from asyncinfer.quantization.int8 import in_8_bits
from asyncinfer.quantization.laid import laid
from asyncinfer.stats import LoadProgress
from asyncinfer.weights import (
    MappedCopy,
    WeightCache,
    WeightLoader,
    WrittenCopy,
    weight_cache,
    weight_copy,
)
from asyncinfer.weights.memory import in_memory

pytestmark = pytest.mark.skipif(not onednn_memory.can_place(), reason="torch maps no weights")

#: More than all copies of a test have.
MOST = 1 << 30


def written(family: str, folder: Path, **changes: Any) -> Path:
    kinds = FAMILIES.get(family, {"plain": {}})
    values = {**SMALL, **next(iter(kinds.values())), **changes}
    randomised(AutoConfig.for_model(family, **values)).save_pretrained(folder)
    return folder


def of_gguf(kind: Q) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        return write_gguf(random_model("llama", "plain"), folder / "model.gguf", kind)

    return made


def of_family(family: str) -> Callable[[Path], Path]:
    return lambda folder: written(family, folder)


MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "llama": (of_family("llama"), {}),
    "in bfloat16": (of_family("llama"), {"dtype": torch.bfloat16}),
    "in bfloat16, in blocks of our own": (of_family("llama"), {"dtype": torch.bfloat16}),
    "in 8 bits": (of_family("llama"), {"storage": "int8"}),
    "in 4 bits": (of_family("llama"), {"storage": "int4"}),
    "in floats of 8 bits": (of_family("llama"), {"storage": "fp8"}),
    "turned": (of_family("gpt2"), {}),
    "experts": (of_family("qwen3_moe"), {}),
    "experts in 8 bits": (of_family("qwen3_moe"), {"storage": "int8"}),
    "a latent": (of_family("deepseek_v2"), {}),
    "a state": (of_family("lfm2"), {}),
    "a file of 8 bits": (of_gguf(Q.Q8_0), {}),
    "a file of 4 bits": (of_gguf(Q.Q4_K), {}),
    "a file as floats": (of_gguf(Q.Q4_1), {"storage": "floats"}),
}


PAIR = (("model", 1e-3), ("draft", 1e-4))


def logits(made: Decoder) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    run = Sequences(made, [torch.randint(0, 199, (n,), generator=generator) for n in (40, 9)])
    run.step(s0=39, s1=8)
    run.step(s0=1, s1=1)
    return run.logits


def loaded(path: Path, cache: WeightCache | None = None, **options: Any) -> Decoder:
    options = {"dtype": torch.float32, **options}
    return load_model(path, "cpu", max_context=64, cache=cache, **options)


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(MOST, tmp_path / "copies")


def copies(cache: WeightCache) -> list[Path]:
    assert cache.folder is not None
    return sorted(cache.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def refuse(*_: object) -> None:
    raise AssertionError("the checkpoint was read")


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_gives_the_bits_of_the_checkpoint(
    name: str, tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "mkl_is_fast", lambda: False)
    if "our own" in name:
        monkeypatch.setattr(onednn, "available", lambda dtype: dtype is torch.float32)
    make, options = MODELS[name]
    (tmp_path / "model").mkdir()
    path = make(tmp_path / "model")
    expected = logits(loaded(path, **options))
    first = loaded(path, cache, **options)
    assert first.notes == loaded(path, **options).notes
    (copy,) = copies(cache)
    assert copy.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(WeightLoader, "__call__", refuse)
    second = loaded(path, cache, **options)
    for found in (logits(first), logits(second)):
        assert all(map(torch.equal, found, expected))


def test_a_copy_is_a_file_that_others_read(tmp_path: Path, cache: WeightCache) -> None:
    loaded(written("llama", tmp_path / "model"), cache)
    with safe_open(copies(cache)[0], "pt") as file:
        about = json.loads(file.metadata()["weights"])
        assert "embedding" in about
        assert set(file.keys()) == {
            f"{name}/{number}" for name, parts in about.items() for number in range(len(parts))
        }
        places = [file.get_tensor(name).data_ptr() for name in file.keys()]  # noqa: SIM118
    assert all(place % 64 == places[0] % 64 for place in places)


@pytest.mark.parametrize("told", [True, False])
def test_a_copy_that_is_on_the_disk_is_read(
    told: bool, tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, before the first step, whether the system says what it holds in memory or not."""
    folder = written("llama", tmp_path / "model")
    expected = logits(loaded(folder, cache))
    with copies(cache)[0].open("rb") as file:
        tells = in_memory(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not told:
            monkeypatch.setattr(weight_copy, "in_memory", lambda _: False)
        made = loaded(folder, cache)
        assert in_memory(file.fileno()) == tells
    assert all(map(torch.equal, expected, logits(made)))


def test_matrices_of_several_formats_in_one_layer(tmp_path: Path) -> None:
    numbers = torch.randint(0, 256, (6, 68), dtype=torch.uint8)
    parts = (
        BlockWeight(numbers[:4], "q8_0", torch.float32),
        laid(in_8_bits(torch.randn(3, 64))),
        BlockWeight(numbers[4:, :36], "q4_0", torch.float32),
    )
    written_copy = WrittenCopy({"of": "a test"})
    written_copy.held("weight", lambda: StackedWeight(parts, torch.float32))
    with (tmp_path / "copy").open("wb") as file:
        written_copy.write(file)
    with FileIO(tmp_path / "copy") as file:
        found = MappedCopy(file, {"of": "a test"}).held("weight", refuse)
    assert isinstance(found, StackedWeight)
    for part, right in zip(found.parts, parts, strict=True):
        assert type(part) is type(right)
        assert torch.equal(part.blocks, right.blocks)
    assert [part.shape for part in found.parts] == [part.shape for part in parts]


def test_progress_is_reported(tmp_path: Path, cache: WeightCache) -> None:
    path = written("llama", tmp_path / "model")
    loaded(path, cache)
    seen: list[LoadProgress] = []
    loaded(path, cache, progress=seen.append)
    assert seen
    assert seen[-1].bytes_done == seen[-1].bytes_total > 0


def grown(path: Path) -> None:
    """Other weights in a file of the same size and time of change."""
    file = path / "model.safetensors"
    state, content = file.stat(), bytearray(file.read_bytes())
    content[-4096:] = bytes(4096)
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def renewed(path: Path) -> None:
    os.utime(path / "model.safetensors", (1, 1))


def configured(path: Path) -> None:
    """The same weights, which mean something else."""
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "rms_norm_eps": 1e-3}))


@pytest.mark.parametrize("change", [grown, renewed, configured])
def test_other_files_have_other_copies(
    change: Callable[[Path], None], tmp_path: Path, cache: WeightCache
) -> None:
    path = written("llama", tmp_path / "model")
    loaded(path, cache)
    change(path)
    expected = logits(loaded(path))
    assert all(map(torch.equal, logits(loaded(path, cache)), expected))
    assert len(copies(cache)) == 2


def test_other_dtypes_formats_and_instructions_have_other_copies(
    tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written("llama", tmp_path / "model")
    for options in ({}, {"dtype": torch.bfloat16}, {"storage": "int8"}):
        loaded(path, cache, **options)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    loaded(path, cache)
    assert len(copies(cache)) == 4


def cut(copy: Path) -> None:
    os.truncate(copy, copy.stat().st_size - 64)


def emptied(copy: Path) -> None:
    copy.write_bytes(b"")


def without_header(copy: Path) -> None:
    copy.write_bytes(bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b"{}" + bytes(100))


def with_long_header(copy: Path) -> None:
    copy.write_bytes(bytes([255] * 8) + bytes(100))


def damaged(copy: Path) -> None:
    """In the header alone, whose layouts say where in memory a product reads."""
    content, of = copy.read_bytes(), rb"\"dtype\": \"float32\""
    assert of in content
    copy.write_bytes(content.replace(of, rb"\"dtype\": \"int32\"  ", 1))


def of_others(copy: Path) -> None:
    copy.chmod(0o666)


def linked(copy: Path) -> None:
    shutil.move(copy, copy.parent.parent / "elsewhere")
    copy.symlink_to(copy.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    "spoil", [cut, emptied, without_header, with_long_header, damaged, of_others, linked]
)
def test_what_is_no_copy_is_written_again(
    spoil: Callable[[Path], None], tmp_path: Path, cache: WeightCache
) -> None:
    path = written("llama", tmp_path / "model")
    expected = logits(loaded(path, cache))
    (copy,) = copies(cache)
    content = copy.read_bytes()
    spoil(copy)
    decoder = loaded(path, cache)
    assert all(map(torch.equal, logits(decoder), expected))
    assert copies(cache) == [copy]
    assert not copy.is_symlink()
    assert copy.read_bytes() == content
    assert copy.stat().st_mode & 0o777 == 0o600


def test_room_for_the_copies_used_last(tmp_path: Path) -> None:
    paths = [written("llama", tmp_path / f"{seed}", rms_norm_eps=10.0**-seed) for seed in (3, 4, 5)]
    size = _copy_bytes(paths[0])
    cache = WeightCache(2 * size + size // 2, tmp_path / "copies")
    for path in paths[:2]:
        loaded(path, cache)
    first, second = copies(cache)
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    loaded(paths[0], cache)
    loaded(paths[2], cache)
    assert first in copies(cache)
    assert second not in copies(cache)
    assert len(copies(cache)) == 2


def test_a_copy_in_use_is_not_removed_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model and its draft would else both be written again at each start."""
    model, draft = (written("llama", tmp_path / name, rms_norm_eps=eps) for name, eps in PAIR)
    size = _copy_bytes(model)
    cache = WeightCache(size + size // 2, tmp_path / "copies")
    loaded(model, cache)
    (note,) = loaded(draft, cache).notes
    assert note.endswith("beside copies that were used within 10 minutes")
    monkeypatch.setattr(WeightLoader, "__call__", refuse)
    loaded(model, cache)


def _copy_bytes(path: Path) -> int:
    cache = WeightCache(MOST, path / "copies")
    loaded(path, cache)
    return copies(cache)[0].stat().st_size


@pytest.mark.parametrize("made", [of_family("llama"), of_gguf(Q.Q8_0)])
def test_a_file_that_is_written_to_while_it_is_read(
    made: Callable[[Path], Path],
    tmp_path: Path,
    cache: WeightCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of its weights may be another model's: it is refused, and no copy of them is kept."""
    path, read = made(tmp_path), WeightLoader.__call__
    (file,) = tmp_path.glob("model.*")

    def changing(loader: WeightLoader, name: str) -> Any:
        weight = read(loader, name)
        state = file.stat()
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000))
        return weight

    monkeypatch.setattr(WeightLoader, "__call__", changing)
    with pytest.raises(ModelLoadError, match="was written to while it was read") as refused:
        loaded(path, cache)
    assert refused.value.file == file.name
    assert not tmp_path.joinpath("copies").exists()
    monkeypatch.undo()

    def replacing(loader: WeightLoader, name: str) -> Any:
        shutil.copy(file, tmp_path / "newer")
        os.replace(tmp_path / "newer", file)
        return read(loader, name)

    monkeypatch.setattr(WeightLoader, "__call__", replacing)
    loaded(path, cache)


def test_files_that_nobody_finishes_are_removed(tmp_path: Path, cache: WeightCache) -> None:
    path = written("llama", tmp_path / "model")
    assert cache.folder is not None
    cache.folder.mkdir()
    left, begun = cache.folder / "tmpleft.new", cache.folder / "tmpbegun.new"
    left.touch()
    with begun.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        loaded(path, cache)
    assert not left.exists()
    assert begun.exists()


def test_processes_that_start_at_once_write_a_copy_once(
    tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else eight of them would take eight times the room of `weight_cache_bytes`."""
    path = written("llama", tmp_path / "model")
    write, folder, begun = WrittenCopy.write, cache.folder, []
    assert folder is not None

    def beside(copy: WrittenCopy, file: Any) -> None:
        begun.append([each.suffix for each in folder.iterdir()])
        assert len(begun) == 1
        assert not loaded(path, cache).notes
        write(copy, file)

    monkeypatch.setattr(WrittenCopy, "write", beside)
    assert not loaded(path, cache).notes
    assert begun == [[".new"]]
    assert [each.suffix for each in folder.iterdir()] == [".safetensors"]
    monkeypatch.setattr(WeightLoader, "__call__", refuse)
    loaded(path, cache)


def test_a_copy_that_another_process_writes_takes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = (written("llama", tmp_path / name, rms_norm_eps=eps) for name, eps in PAIR)
    size = _copy_bytes(model)
    cache, write = WeightCache(size + size // 2, tmp_path / "copies"), WrittenCopy.write
    notes: list[str] = []

    def beside(copy: WrittenCopy, file: Any) -> None:
        notes.extend(loaded(draft, cache).notes)
        write(copy, file)

    monkeypatch.setattr(WrittenCopy, "write", beside)
    assert not loaded(model, cache).notes
    assert notes[0].endswith("beside copies that were used within 10 minutes")
    assert len(copies(cache)) == 1


def test_a_file_that_is_taken_for_unfinished_is_begun_again(
    tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes it between the moment when it is there and that of its lock."""
    path, locked = written("llama", tmp_path / "model"), weight_cache._locked
    removed: list[str] = []

    def late(handle: int) -> bool:
        if not removed:
            (begun,) = Path(str(cache.folder)).iterdir()
            begun.unlink()
            removed.append(begun.suffix)
        return locked(handle)

    monkeypatch.setattr(weight_cache, "_locked", late)
    assert not loaded(path, cache).notes
    assert removed == [".new"]
    assert len(copies(cache)) == 1


def test_a_damaged_copy_takes_no_room_from_its_successor(tmp_path: Path) -> None:
    path = written("llama", tmp_path / "model")
    size = _copy_bytes(path)
    cache = WeightCache(size + size // 2, tmp_path / "copies")
    loaded(path, cache)
    damaged(copies(cache)[0])
    assert not loaded(path, cache).notes


def test_a_limit_that_is_too_small_is_told(tmp_path: Path) -> None:
    path, cache = written("llama", tmp_path / "model"), WeightCache(1000, tmp_path / "copies")
    (note,) = loaded(path, cache).notes
    assert note.startswith("no copy of its weights was kept: weight_cache_bytes=1000 is less than ")
    assert not (tmp_path / "copies").exists()


def test_a_full_disk_is_told(
    tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written("llama", tmp_path / "model")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weight_cache.os, "fsync", full)
    decoder = loaded(path, cache)
    assert decoder.notes == (
        f"no copy of its weights was kept: {cache.folder}: No space left on device",
    )
    assert not copies(cache)
    assert all(map(torch.equal, logits(decoder), logits(loaded(path))))


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could tell a file that is being written from one that nobody finishes."""
    path = written("llama", tmp_path / "model")

    def without(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without)
    for _ in range(2):
        assert loaded(path, cache).notes == (
            f"no copy of its weights was kept: {cache.folder}: No locks available",
        )
        assert not copies(cache)


def test_a_torch_that_tells_no_layouts(
    tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr(onednn, "mkl_is_fast", lambda: False)
    path = written("llama", tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(weight_copy, "layout_of", fail)
        (note,) = loaded(path, cache).notes
    assert note.endswith("torch does not tell its layout: not here")
    loaded(path, cache)
    monkeypatch.setattr(reordered, "placed", fail)
    expected = logits(loaded(path))
    assert all(map(torch.equal, logits(loaded(path, cache)), expected))


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = written("llama", tmp_path / "model")
    (note,) = loaded(path, WeightCache(MOST, tmp_path / "file" / "copies")).notes
    assert "Not a directory" in note


@pytest.mark.skipif(not onednn.available(torch.float32), reason="torch without oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (100, 36), (17, 5)])
def test_a_weight_of_given_memory(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if not onednn.available(dtype):
        pytest.skip("no such products here")
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*s, generator=generator).to(dtype) for s in (shape, (7, shape[1])))
    made = ReorderedWeight.of(weight)
    place = onednn_memory.place_of(made.tensor)
    assert place is not None
    memory = torch.empty(place[1], dtype=torch.uint8)
    ctypes.memmove(memory.data_ptr(), *place)
    layout = onednn_memory.layout_of(made.tensor)
    again = ReorderedWeight.at(memory, shape, dtype, layout, made.native is not None)
    assert torch.equal(onednn.linear(x, again.tensor), onednn.linear(x, made.tensor))
    if made.native is not None:
        assert again.native is not None
        assert torch.equal(again.native(x), made.native(x))


def test_an_engine_keeps_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "user_cache_path", lambda name: tmp_path)
    answers = []
    for limit in (None, MOST, MOST):
        with SyncEngine(device="cpu", weight_cache_bytes=limit) as engine:
            answers.append(engine.generate("def add(", max_tokens=8, temperature=0.0).token_ids)
        if limit is not None:
            monkeypatch.setattr(WeightLoader, "__call__", refuse)
    assert len(set(answers)) == 1
    assert len([*(tmp_path / "weights").iterdir()]) == 1
