"""GGUF files: headers beside the `gguf` package's reader, tensors of every type, broken files."""

from __future__ import annotations

import math
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels.block_types import BLOCK_TYPES
from asyncinfer.quantization import BlockWeight, PackedRows, StackedWeight
from asyncinfer.quantization import packed as packed_module
from asyncinfer.weights import LoadProgress, Packed, Piece, WeightLoader
from asyncinfer.weights.gguf import (
    GgufCheckpoint,
    find_gguf,
    read_header,
    split_names,
)
from asyncinfer.weights.gguf import checkpoint as checkpoint_module

Q = gguf.GGMLQuantizationType
FLOATS = (Q.F32, Q.F16)
#: The types that the package makes floats of.
TYPES = [*FLOATS, *(kind for kind in gguf.quants._type_traits)]
KEYS: dict[str, Any] = {
    "general.name": "näme",
    "test.uint8": np.uint8(7),
    "test.float": 1.5,
    "test.bool": True,
    "test.negative": np.int64(-(2**40)),
    "test.strings": ["a", "", "ß" * 300],
    "test.numbers": [1, 2, 3],
    "test.floats": [0.5, -1.0],
    "test.flags": [True, False],
}


def written(path: Path, tensors: dict[str, tuple[Q, np.ndarray[Any, Any]]]) -> Path:
    """A file of `KEYS` and of tensors, each a type and its bytes by row."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", KEYS["general.name"])
    writer.add_uint8("test.uint8", 7)
    writer.add_float32("test.float", 1.5)
    writer.add_bool("test.bool", True)
    writer.add_int64("test.negative", -(2**40))
    for key in ("test.strings", "test.numbers", "test.floats", "test.flags"):
        writer.add_array(key, KEYS[key])
    for name, (kind, values) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_bytes(kind: Q, rows: int, numbers: int) -> np.ndarray[Any, Any]:
    """Rows of so many numbers: floats of moderate size, and blocks of any bytes whose halves are
    finite numbers."""
    draw = np.random.default_rng(5)
    floats = draw.normal(size=(rows, numbers)).astype(np.float32)
    try:
        return gguf.quantize(floats, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        # With the highest bit but one of every byte off no half has the exponent of infinity.
        return draw.integers(0, 256, (rows, numbers // block * size), np.uint8) & 0xBF


def test_the_header_says_what_the_package_reads(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = written(tmp_path / "a.gguf", {"x": (Q.F32, values), "y": (Q.F32, values[0])})
    header = read_header(path)
    reader = gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        found = header.metadata[key]
        plain = found.tolist() if isinstance(found, np.ndarray) else found
        assert plain == field.contents()
    assert header.metadata.keys() == {k for k in reader.fields if not k.startswith("GGUF.")}
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (info.kind, info.offset) == (tensor.tensor_type, tensor.data_offset)


def test_a_header_that_is_held_is_that_of_the_file_as_it_was(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = written(tmp_path / "a.gguf", {"x": (Q.F32, values)})
    held = read_header(path)
    assert read_header(path) is held
    other = written(tmp_path / "b.gguf", {"z": (Q.F32, values)})
    other.replace(path)
    assert read_header(path).tensors.keys() == {"z"}
    assert held.tensors.keys() == {"x"}


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type(kind: Q, tmp_path: Path) -> None:
    """Each number as the package has it, read whole, and in pieces that begin within a block."""
    packed = random_bytes(kind, 3, 512)
    path = written(tmp_path / "a.gguf", {"x": (kind, packed)})
    right = np.ascontiguousarray(gguf.dequantize(packed, kind))
    with GgufCheckpoint(path) as checkpoint:
        stored = checkpoint.tensors["x"]
        assert stored.shape == (3, 512)
        if stored.dtype != "F32":
            right = packed
        raw = right.reshape(-1).view(np.uint8)
        whole = np.empty_like(raw)
        checkpoint.reader.read("a.gguf", "x", 0, whole.data)
        np.testing.assert_array_equal(whole, raw)
        pieces = np.empty_like(raw)
        for start in range(0, len(raw), 844):
            checkpoint.reader.read("a.gguf", "x", start, pieces[start : start + 844].data)
        np.testing.assert_array_equal(pieces, raw)


def test_an_infinite_scale_is_read_without_a_warning(tmp_path: Path) -> None:
    packed = gguf.quantize(np.arange(32, dtype=np.float32)[None], Q.Q8_0)
    packed[0, :2] = np.float16([math.inf]).view(np.uint8)
    with GgufCheckpoint(written(tmp_path / "a.gguf", {"x": (Q.Q8_0, packed)})) as checkpoint:
        got = np.empty(32, np.float32)
        checkpoint.reader.read("a.gguf", "x", 0, got.data.cast("B"))
    assert np.isnan(got[0])
    assert np.isinf(got[1:]).all()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_held_as_they_are_in_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, and each number as the package has it, by the kernel and by torch."""
    kind, block = Q[name.upper()], BLOCK_TYPES[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (block.numbers, block.size)
    data = random_bytes(kind, 5, 512)
    right = torch.from_numpy(gguf.dequantize(data, kind).copy())
    table = {"x": Packed((Piece("x", (5, 512)),))}
    with GgufCheckpoint(written(tmp_path / "a.gguf", {"x": (kind, data)})) as checkpoint:
        assert checkpoint.block_type("x") == name
        cpu = torch.device("cpu")
        # Read a few bytes at a time.
        weight = WeightLoader(
            checkpoint, table, cpu, torch.float32, None, keep_packed=True, chunk=100
        )("x")
    assert isinstance(weight, BlockWeight)
    assert weight.shape == (5, 512)
    np.testing.assert_array_equal(weight.blocks.numpy(), data)
    assert torch.equal(weight.dequantised(), right)
    assert torch.equal(weight[torch.tensor([4, 0])].dequantised(), right[[4, 0]])
    assert torch.equal(weight.grouped().dequantised(), right)
    rows = PackedRows(weight)
    if rows.has_kernel:
        assert rows.nbytes == data.nbytes
        assert torch.equal(rows[0:5], right)
    monkeypatch.setattr(packed_module, "packed_kernel", lambda *_: None)
    rows = PackedRows(weight)
    assert not rows.has_kernel
    # Of whole numbers of 4 bits scales that are no float16 lose bits.
    grouped = weight.grouped()
    offsets = 0.0 if grouped.offsets is None else grouped.offsets.abs().amax()
    lost = 2.0**-11 if name in ("q2_k", "q3_k", "q4_k") else 2.0**-22
    bound = float(lost * (255 * grouped.scales.abs().amax() + offsets))
    torch.testing.assert_close(rows[0:5], right, rtol=1e-6, atol=bound)


def test_the_loader_gives_pieces_below_each_other_as_they_are_quantised(tmp_path: Path) -> None:
    tensors = {name: (Q.Q4_1, random_bytes(Q.Q4_1, 3, 64)) for name in ("a", "b")}
    tensors["c"] = (Q.F32, np.ones((2, 64), np.float32))
    tensors["d"] = (Q.Q8_0, random_bytes(Q.Q8_0, 2, 64))
    told: list[LoadProgress] = []
    names = {"both": "ab", "kinds": "abd", "mixed": "ac"}
    rows = {name: len(values) for name, (_, values) in tensors.items()}
    table = {
        name: Packed(tuple(Piece(piece, (rows[piece], 64)) for piece in pieces))
        for name, pieces in names.items()
    }
    with GgufCheckpoint(written(tmp_path / "a.gguf", tensors)) as checkpoint:
        cpu = torch.device("cpu")
        loader = WeightLoader(checkpoint, table, cpu, torch.float32, told.append, keep_packed=True)
        both, kinds, mixed = (loader(name) for name in names)
    right = {
        name: torch.from_numpy(np.array(gguf.dequantize(values, kind)))
        for name, (kind, values) in tensors.items()
    }
    assert isinstance(both, BlockWeight)
    assert torch.equal(both.dequantised(), torch.cat([right["a"], right["b"]]))
    assert isinstance(kinds, StackedWeight)
    assert [part.shape[0] for part in kinds.parts] == [6, 2]
    assert torch.equal(kinds.dequantised(), torch.cat([right[name] for name in "abd"]))
    assert isinstance(mixed, torch.Tensor)
    assert torch.equal(mixed, torch.cat([right["a"], right["c"]]))
    assert told[-1].bytes_done == told[-1].bytes_total == 4 * 3 * 40 + 2 * 68 + 4 * 5 * 64


def test_other_tensors_are_not_held_in_blocks(tmp_path: Path) -> None:
    tensors = {
        "a": (Q.F16, np.ones((2, 64), np.float16)),
        "b": (Q.IQ3_S, random_bytes(Q.IQ3_S, 2, 256)),
        "c": (Q.Q8_0, random_bytes(Q.Q8_0, 1, 64)[0]),
    }
    with GgufCheckpoint(written(tmp_path / "a.gguf", tensors)) as checkpoint:
        assert [checkpoint.block_type(name) for name in "abc"] == [None] * 3


def test_experts_are_given_one_by_one(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(3, 4, 32)).astype(np.float32)
    packed = gguf.quantize(values, Q.Q8_0)
    path = written(tmp_path / "a.gguf", {"blk.0.ffn_up_exps.weight": (Q.Q8_0, packed)})
    with GgufCheckpoint(path) as checkpoint:
        assert sorted(checkpoint.tensors) == [f"blk.0.ffn_up_exps.{i}.weight" for i in range(3)]
        got = np.empty((4, 32), np.float32)
        checkpoint.reader.read("a.gguf", "blk.0.ffn_up_exps.2.weight", 0, got.data.cast("B"))
        np.testing.assert_array_equal(got, gguf.dequantize(packed, Q.Q8_0)[2])


@pytest.mark.parametrize("between", ["-of-", "-OF-"])
@pytest.mark.parametrize("suffix", [".gguf", ".GGUF"])
def test_parts_of_a_split_model_are_spelled_alike(between: str, suffix: str) -> None:
    """A file system may tell small letters from capitals."""
    names = [f"m-0000{part}{between}00002{suffix}" for part in (1, 2)]
    assert split_names(names[0]) == names


def test_a_model_in_several_files(tmp_path: Path) -> None:
    ones = np.ones(4, np.float32)
    first = written(tmp_path / "m-00001-of-00002.gguf", {"x": (Q.F32, ones)})
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002\.gguf: no such file"):
        GgufCheckpoint(first)
    second = written(tmp_path / "m-00002-of-00002.gguf", {"y": (Q.F32, 2 * ones)})
    with GgufCheckpoint(first) as checkpoint:
        assert checkpoint.tensors["y"].file == second.name
    with pytest.raises(ModelLoadError, match="is file 2 of 2: name the first"):
        GgufCheckpoint(second)
    written(second, {"x": (Q.F32, ones)})
    with pytest.raises(ModelLoadError, match="occurs twice"):
        GgufCheckpoint(first)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("b-Q4_K_M.gguf", "b-Q4_K_M.gguf"),
        ("q4_k_m", "b-Q4_K_M.gguf"),
        ("Q8", "b-Q8_0-00001-of-00002.gguf"),
        ("f16", "sub/b-F16.gguf"),
        ("mmproj-F16.gguf", "mmproj-F16.gguf"),
    ],
)
def test_a_file_is_found_by_a_part_of_its_name(wanted: str, found: str) -> None:
    names = ["b-Q4_K_M.gguf", "b-Q4_K_S.gguf", *split_names("b-Q8_0-00001-of-00002.gguf")]
    names += ["sub/b-F16.gguf", "mmproj-F16.gguf", "sub/mmproj-model-f16.gguf"]
    assert find_gguf(names, wanted, "org/name") == found


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("Q4_K", r"several files named like 'Q4_K'; name one of: b-Q4_K_M.gguf, b-Q4_K_S.gguf"),
        ("Q2", r"no file named like 'Q2'; name one of: b-Q4_K_M.gguf, b-Q4_K_S.gguf"),
        ("", r"several files of GGUF"),
    ],
)
def test_what_there_is_is_named_where_none_or_several_fit(wanted: str, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        find_gguf(["b-Q4_K_M.gguf", "b-Q4_K_S.gguf"], wanted, "org/name")


def header(tensors: int = 0, pairs: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, pairs) + rest


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(
    dims: tuple[int, ...],
    kind: int = 0,
    offset: int = 0,
    count: int | None = None,
    name: bytes = b"x",
) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims) if count is None else count, *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


PAD = b"\0" * 64
BROKEN = {
    "empty": (b"", "is empty"),
    "another format": (b"GGML" + PAD, "does not begin as a GGUF file does"),
    "version 1": (header(version=1, rest=PAD), "version 1: must be 2 or 3"),
    "big endian": (header(version=3 << 24, rest=PAD), "big-endian"),
    "2^60 tensors": (header(tensors=2**60, rest=PAD), "1152921504606846976 tensors"),
    "2^60 keys": (header(pairs=2**60, rest=PAD), "1152921504606846976 metadata keys"),
    "a key of 2^60 bytes": (header(pairs=1, rest=text(b"k", 2**60) + PAD), "metadata key 0"),
    "a key twice": (
        header(pairs=2, rest=(text(b"key") + struct.pack("<IB", 0, 1)) * 2 + PAD),
        "key: occurs twice",
    ),
    "a string of 2^60 bytes": (
        header(pairs=1, rest=text(b"key") + struct.pack("<I", 8) + text(b"", 2**60) + PAD),
        "metadata key: 1152921504606846976 bytes",
    ),
    "an unknown type": (
        header(pairs=1, rest=text(b"key") + struct.pack("<I", 99) + PAD),
        "metadata key: value type 99",
    ),
    "an array of 2^60 numbers": (
        header(pairs=1, rest=text(b"key") + struct.pack("<IIQ", 9, 4, 2**60) + PAD),
        "metadata key: 1152921504606846976 numbers",
    ),
    "an array of 2^60 strings": (
        header(pairs=1, rest=text(b"key") + struct.pack("<IIQ", 9, 8, 2**60) + PAD),
        "metadata key: 1152921504606846976 values",
    ),
    "arrays in arrays": (
        header(pairs=1, rest=text(b"key") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9),
        "metadata key: value type 9",
    ),
    "no dimensions": (header(1, rest=tensor(()) + PAD), "tensor x: 0 dimensions"),
    "five dimensions": (header(1, rest=tensor((1,) * 5) + PAD), "tensor x: 5 dimensions"),
    "a shape of 2^120": (header(1, rest=tensor((2**60, 2**60)) + PAD), "tensor x: shape"),
    "a type unheard of": (header(1, rest=tensor((4,), kind=4711) + PAD), "x: type 4711"),
    "half a block": (header(1, rest=tensor((16,), kind=2) + PAD), "x: rows of 16 numbers: Q4_0"),
    "beyond the end": (header(1, rest=tensor((4096,)) + PAD), "x: ends at byte"),
    "an offset of 2^63": (header(1, rest=tensor((4,), offset=2**63) + PAD), "x: ends at byte"),
    "2^40 experts": (
        header(1, rest=tensor((32, 2**40), name=b"blk.0.ffn_up_exps.weight") + PAD),
        "ends at byte",
    ),
    "20,000 experts": (
        header(1, rest=tensor((1, 20_000), name=b"blk.0.ffn_up_exps.weight") + b"\0" * 80_064),
        "20000 experts, more than 16384",
    ),
    "integers for weights": (header(1, rest=tensor((4,), kind=24) + PAD), "type I8 cannot be read"),
    "a type for sums only": (
        header(1, rest=tensor((32,), kind=9) + PAD),
        "type Q8_1 cannot be read",
    ),
    "70,000 arrays in an array": (
        header(pairs=1, rest=text(b"key") + struct.pack("<IIQ", 9, 9, 70_000) + b"\0" * 840_000),
        "metadata key: 70000 arrays in arrays, more than 65536",
    ),
    "a key of 2^16 bytes": (
        header(pairs=1, rest=text(b"k" * 2**16) + PAD),
        "metadata key 0: 65536 bytes, more than 65535",
    ),
    "the same name twice": (header(2, rest=tensor((1,)) * 2 + PAD), "x: occurs twice"),
    "an alignment of 3": (
        header(pairs=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 3) + PAD),
        "general.alignment: 3: must be a multiple of 8",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_what_is_wrong(name: str, tmp_path: Path) -> None:
    content, says = BROKEN[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        GgufCheckpoint(path)
    assert says in str(caught.value)
    assert "a.gguf" in str(caught.value)


def test_experts_that_overlap_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of some megabytes could have two billion of them."""
    monkeypatch.setattr(checkpoint_module, "_MOST_TENSORS", 100)
    path = tmp_path / "a.gguf"
    names = [b"blk.%d.ffn_up_exps.weight" % layer for layer in range(4)]
    infos = [tensor((1, 32), offset=128 * layer, name=n) for layer, n in enumerate(names)]
    path.write_bytes(header(4, rest=b"".join(infos) + PAD * 9))
    with pytest.raises(ModelLoadError, match=r"blk\.3\..*more than 100 tensors"):
        GgufCheckpoint(path)


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    infos = tensor((4,), name=b"x") + tensor((4,), offset=12, name=b"y")
    path.write_bytes(header(2, rest=infos + PAD))
    with pytest.raises(ModelLoadError, match=r"a\.gguf, tensor y: begins at byte \d+, within x"):
        GgufCheckpoint(path)


def split_part(path: Path, name: str, **said: int) -> Path:
    """A file of one tensor, with what it says of the files that a model was split into."""
    pairs = [
        text(f"split.{key}".replace("_", ".").encode()) + struct.pack("<IH", 2, value)
        for key, value in said.items()
    ]
    rest = b"".join(pairs) + tensor((4,), name=name.encode())
    path.write_bytes(header(1, len(pairs), rest) + PAD)
    return path


def test_files_of_a_split_model_say_which_they_are(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    said = {"count": 2, "tensors_count": 2}
    split_part(first, "x", no=0, **said)
    split_part(second, "y", no=1, **said)
    with GgufCheckpoint(first) as checkpoint:
        assert sorted(checkpoint.tensors) == ["x", "y"]
    for wrong, says in (
        ({"no": 0}, r"m-00002-of-00002\.gguf: split\.no=0: must be 1 of file 2 of 2"),
        ({"count": 3}, r"m-00002-of-00002\.gguf: split\.count=3: must be 2"),
        ({"tensors_count": 5}, r"m-00002-of-00002\.gguf: split\.tensors\.count=5: must be 2"),
    ):
        split_part(second, "y", **{"no": 1, **said, **wrong})
        with pytest.raises(ModelLoadError, match=says):
            GgufCheckpoint(first)
    alone = split_part(tmp_path / "renamed.gguf", "x", no=0, **said)
    with pytest.raises(ModelLoadError, match=r"renamed\.gguf: split\.count=2: must be 1 of file 1"):
        GgufCheckpoint(alone)
    # Files that were merged again.
    with GgufCheckpoint(split_part(alone, "x", no=0, count=0, tensors_count=1)):
        pass


def test_a_sparse_file_is_not_taken_for_a_header(tmp_path: Path) -> None:
    """Its holes would become metadata of as many bytes."""
    path = tmp_path / "a.gguf"
    for item, each, what in ((0, 1, "numbers"), (8, 8, "values")):
        with path.open("wb") as file:
            count = 2**36 // each - 1024
            rest = text(b"key") + struct.pack("<IIQ", 9, item, count)
            file.write(header(pairs=1, rest=rest))
            file.truncate(2**36)
        with pytest.raises(ModelLoadError, match=f"metadata key: {count} {what}"):
            GgufCheckpoint(path)


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file would kill the process."""
    path = tmp_path / "a.gguf"
    numbers = text(b"numbers") + struct.pack("<IIQ4B", 9, 0, 4, 1, 2, 3, 4)
    names = [b"name %d" % number for number in range(200_000)]
    listed = struct.pack("<IIQ", 9, 8, len(names)) + b"".join(text(name) for name in names)
    path.write_bytes(header(pairs=2, rest=numbers + text(b"names") + listed))
    assert read_header(path).metadata["names"] == [name.decode() for name in names]
    from_buffer = np.frombuffer

    def cut(*args: Any) -> np.ndarray[Any, Any]:
        os.truncate(path, 4096)
        return from_buffer(*args)

    monkeypatch.setattr(np, "frombuffer", cut)
    with pytest.raises(ModelLoadError, match=r"metadata names: the file ends within it, after"):
        read_header(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.gguf", "{}: is not a regular file"),
        ("a-00001-of-00002.gguf", "{}: is not a regular file; a-00001-of-00002.gguf is one of 2"),
        ("b.gguf", "{}: no such file"),
        ("b-00001-of-00002.gguf", "{}: no such file; b-00001-of-00002.gguf is one of 2"),
    ],
)
def test_what_is_no_file_is_called_what_it_is(name: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name[0] == "a":
        os.mkfifo(path)
    with pytest.raises(ModelLoadError) as caught:
        GgufCheckpoint(path)
    assert str(caught.value) == f"file {says.format(path)}"


SOUND = np.arange(64, dtype=np.float32).reshape(2, 32)


@fuzz(60)
@given(data=st.data())
def test_fuzzed_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes changed, taken out or put in anywhere: the file is refused, or read within its size."""
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    content = bytearray(
        written(
            path, {"x": (Q.F32, SOUND), "y": (Q.Q8_0, gguf.quantize(SOUND, Q.Q8_0))}
        ).read_bytes()
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(("change", "cut", "insert", "number"))):
            case "change":
                content[at] = data.draw(st.integers(0, 255))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 40))]
            case "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=16))
            case "number":
                value = data.draw(st.sampled_from((0, 2**31, 2**32 - 1, 2**60, 2**64 - 1)))
                content[at : at + 8] = struct.pack("<Q", value)
        if not content:
            break
    path.write_bytes(content)
    try:
        with GgufCheckpoint(path) as checkpoint:
            for name, stored in checkpoint.tensors.items():
                got = np.empty(stored.shape, np.float32)
                checkpoint.reader.read(stored.file, name, 0, got.data.cast("B"))
                assert got.nbytes <= 32 * len(content)
    except ModelLoadError:
        pass


#: Numbers that bounds are held against.
EDGES = (0, 1, 2, 31, 32, 33, 2**16, 2**31, 2**32 - 1, 2**32, 2**47, 2**60, 2**63, 2**64 - 1)


@st.composite
def infos(draw: st.DrawFn) -> bytes:
    """The entry of a tensor, perhaps of the same name and place as another."""
    dims = draw(st.lists(st.sampled_from((1, 2, 32, 32, 64, *EDGES)), max_size=5))
    name = draw(st.sampled_from((b"x", b"y", b"blk.0.ffn_up_exps.weight", b"blk.0.ssm_a", b"")))
    kind = draw(st.sampled_from((0, 0, 1, 2, 8, 24, 99)))
    offset = draw(st.sampled_from((0, 0, 32, 64, 128, *EDGES)))
    return tensor(tuple(dims), kind, offset, name=name)


@st.composite
def pairs(draw: st.DrawFn) -> bytes:
    """A key and a value, whose count or type may be another than the value's."""
    names = (b"general.alignment", b"split.count", b"split.no", b"xielu.beta", b"k", b"\xff")
    key = text(draw(st.sampled_from(names)))
    kind = draw(st.integers(0, 13))
    if kind == 9:
        count = draw(st.sampled_from((0, 1, 2, 3, *EDGES)))
        return key + struct.pack("<IIQ", 9, draw(st.integers(0, 13)), count) + draw(st.binary())
    return key + struct.pack("<I", kind) + draw(st.binary(max_size=16))


@fuzz(300)
@given(
    tensors=st.lists(infos(), max_size=4),
    entries=st.lists(pairs(), max_size=3),
    missing=st.sampled_from((0, 0, 0, 1, -1)),
    padding=st.sampled_from((0, 64, 1024, 8192)),
)
def test_fuzzed_headers(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[bytes],
    entries: list[bytes],
    missing: int,
    padding: int,
) -> None:
    """Entries that fit each other badly: the file is named, or its tensors lie within it, apart."""
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    rest = b"".join(entries) + b"".join(tensors) + b"\0" * padding
    path.write_bytes(header(max(0, len(tensors) + missing), len(entries), rest))
    size = path.stat().st_size
    refusal, numbers = "a.gguf", 0
    tracemalloc.start()
    try:
        with GgufCheckpoint(path) as checkpoint:
            numbers = sum(math.prod(each.shape) for each in checkpoint.tensors.values())
    except ModelLoadError as error:
        refusal = str(error)
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert "a.gguf" in refusal
    assert numbers <= 2 * size
    assert most < (1 << 20) + 64 * size
