"""Safetensors and index files with hostile headers: what they mean is what was written, or they
are refused by name, before memory is taken for what they claim."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from models.hostile_json import VALUES, changed
from safetensors.torch import save

from asyncinfer.engine.defaults import GenerationDefaults, generation_defaults
from asyncinfer.errors import ModelLoadError
from asyncinfer.models.remote_code import tokenizer_code
from asyncinfer.weights import (
    Packed,
    Piece,
    SafetensorsCheckpoint,
    WeightLoader,
    check_weights,
    loader,
)

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.arange(5.0),
}
TABLE = {name: Packed((Piece(name, tuple(t.shape)),)) for name, t in TENSORS.items()}
WHOLE = save(TENSORS, metadata={"format": "pt"})
LENGTH = struct.unpack("<Q", WHOLE[:8])[0]
HEADER = json.loads(WHOLE[8 : 8 + LENGTH])
DATA = WHOLE[8 + LENGTH :]
INDEX = "model.safetensors.index.json"
NUMBERS = (0, 1, -1, 2, 3, 4, 6, 8, 12, 24, 25, 52, 2**31, 2**60, 2**63, 2**64 - 1, 2**64, 1.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@pytest.fixture(autouse=True)
def only_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing larger is asked for than what the file has."""
    real = loader.empty

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert torch.Size(shape).numel() * dtype.itemsize <= 64
        return real(shape, dtype, device)

    monkeypatch.setattr(loader, "empty", empty)


def check(folder: Path, files: tuple[str, ...]) -> bool:
    """Whether the checkpoint is taken, and then it means what it meant."""
    try:
        with SafetensorsCheckpoint(folder) as checkpoint:
            check_weights(checkpoint, TABLE)
            source = WeightLoader(checkpoint, TABLE, torch.device("cpu"), torch.float32, None)
            read = {name: source(name) for name in TABLE}
    except ModelLoadError as error:
        blamed = (*files, *([str(folder)] if "missing in the checkpoint" in str(error) else []))
        named = error.file in blamed
        if not named or len(str(error)) > 2_000:
            pytest.fail(f"{error.file!r}: {error}")
        return False
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor.float()), name
    return True


@st.composite
def headers(draw: st.DrawFn) -> dict[str, Any]:
    """The header with a few numbers, types or names changed."""
    header: dict[str, Any] = json.loads(json.dumps(HEADER))
    for _ in range(draw(st.integers(1, 3))):
        entry = draw(st.sampled_from(sorted(set(header) - {"__metadata__"}) or ["a"]))
        what = draw(st.sampled_from(["shape", "data_offsets", "dtype", "entry", "name", "drop"]))
        number = st.sampled_from(NUMBERS)
        if what == "drop":
            header.pop(entry, None)
        elif what == "entry" or not isinstance(header.get(entry), dict):
            header[entry] = draw(st.sampled_from(VALUES))
        elif what == "name":
            header[draw(st.sampled_from(["a", "d", "", "__metadata__", "x" * 500]))] = header[entry]
        elif what == "dtype":
            dtypes = st.sampled_from(["F32", "F64", "BF16", "U8", "BOOL", "F4", "f32", "", None, 7])
            header[entry]["dtype"] = draw(dtypes)
        else:
            most = 2 if what == "data_offsets" else 4
            header[entry][what] = draw(
                st.lists(number, min_size=most // 2, max_size=most) | st.sampled_from(VALUES)
            )
    return header


@fuzz(400)
@given(
    header=headers(),
    length=st.none() | st.sampled_from([0, 1, 7, 2**20, 10**8, 10**8 + 1, 2**63, 2**64 - 1]),
    data=st.sampled_from([DATA, DATA[:-1], DATA + b"\0", b""]),
)
def test_fuzz_a_header(
    folder: Path, header: dict[str, Any], length: int | None, data: bytes
) -> None:  # fault 45
    text = json.dumps(header).encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    (folder / INDEX).unlink(missing_ok=True)
    (folder / "model.safetensors").write_bytes(size + text + data)
    check(folder, ("model.safetensors",))


@fuzz(200)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, len(WHOLE)),
)
def test_fuzz_bytes_of_a_header(
    folder: Path, changes: list[tuple[int, int]], cut: int
) -> None:  # fault 45
    """Of the file itself: a byte of a tensor means another tensor, which no check can tell."""
    content = bytearray(WHOLE)
    for place, value in changes:
        content[place % (8 + LENGTH)] = value
    (folder / INDEX).unlink(missing_ok=True)
    (folder / "model.safetensors").write_bytes(content if cut % 2 else content[:cut])
    check(folder, ("model.safetensors",))


SHARDS = ("one.safetensors", "two.safetensors")
MAP = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}


@fuzz(200)
@given(data=st.data())
def test_fuzz_an_index(folder: Path, data: st.DataObject) -> None:  # fault 45, 47
    single = folder / "model.safetensors"
    single.unlink(missing_ok=True)
    for shard in SHARDS:
        there = {name: tensor for name, tensor in TENSORS.items() if MAP[name] == shard}
        (folder / shard).write_bytes(save(there))
    index = data.draw(changed({"metadata": {"total_size": 52}, "weight_map": MAP}, ("d",)))
    if data.draw(st.booleans()) and isinstance(index.get("weight_map"), dict):
        out = st.sampled_from(["../x.safetensors", "/x.safetensors", *SHARDS, "three.safetensors"])
        index["weight_map"][data.draw(st.sampled_from([*MAP, "d"]))] = data.draw(out)
    text = json.dumps(index)
    (folder / INDEX).write_text(data.draw(st.sampled_from([text, text[:-1], f"[{text}]"])))
    check(folder, (INDEX, str(folder / INDEX), "three.safetensors", *SHARDS))


SETTINGS = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
AUTO = {"auto_map": {"AutoTokenizer": ["tokenization.Slow", None]}, "bos_token": "<s>"}


@fuzz(200)
@given(data=st.data())
def test_fuzz_the_small_files(folder: Path, data: st.DataObject) -> None:  # fault 45, 49
    for name, base, read in (
        ("generation_config.json", SETTINGS, generation_defaults),
        ("tokenizer_config.json", AUTO, tokenizer_code),
    ):
        path = folder / name
        more = ("repetition_penalty", "typical_p", "auto_map", "AutoTokenizer")
        path.write_text(json.dumps(data.draw(changed(dict(base), more))))
        try:
            came = read(folder)
        except ModelLoadError as error:
            if error.file != str(path) or len(str(error)) > 2_000:
                pytest.fail(f"{error.file!r}: {error}")
        else:
            assert isinstance(came, GenerationDefaults | tuple)
