"""Messages about checkpoints, whose names and values may be hostile."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from asyncinfer.errors import ModelLoadError
from asyncinfer.models.gguf.architectures import ARCHITECTURES
from asyncinfer.weights import open_checkpoint

LONG = "layers." * 100_000


def test_names_are_shown_on_one_line() -> None:
    error = ModelLoadError("is cut", file="folder\nfile", tensor="a\x1b[2J\ud800")
    assert str(error) == "file folder\\nfile, tensor a\\x1b[2J\\ud800: is cut"
    assert (error.file, error.tensor) == ("folder\nfile", "a\x1b[2J\ud800")
    assert str(ModelLoadError("ist kürzer", file="Gewichte/Größe")) == (
        "file Gewichte/Größe: ist kürzer"
    )


def test_long_names_lose_their_middle() -> None:
    error = ModelLoadError(f"value={LONG!r}: must be short", tensor=LONG)
    assert len(str(error)) < 3000
    assert str(error).startswith("tensor layers.layers.")
    assert str(error).endswith("': must be short")
    assert error.tensor == LONG


def test_all_architectures_are_shown() -> None:
    message = f"must be one of {', '.join(ARCHITECTURES)}"
    assert str(ModelLoadError(message)) == message


@pytest.mark.parametrize("name", [LONG, "up\n" * 300])
def test_what_a_file_says(name: str, tmp_path: Path) -> None:
    """By a shard's index, and by the header of a file."""
    index = {"weight_map": {name: f"../{name}.safetensors"}}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    header = json.dumps({name: {"dtype": "F32", "shape": [], "data_offsets": [0, 8]}}).encode()
    said = []
    for _ in range(2):
        with pytest.raises(ModelLoadError) as refused:
            open_checkpoint(tmp_path)
        said.append(str(refused.value))
        file = struct.pack("<Q", len(header)) + header + bytes(8)
        (tmp_path / "model.safetensors").write_bytes(file)
    assert "leads out of the folder" in said[0]
    assert "other bytes than its dtype and shape" in said[1]
    assert all(len(text) < 3000 and "\n" not in text for text in said)
