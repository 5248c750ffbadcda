"""Files in the cache folder: nothing else at their path is read, and the oldest of them go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncinfer.kernels import kept
from asyncinfer.kernels.kept import keep, kept_path, read_kept

KEY = {"device": "a"}


def written(folder: Path, number: int) -> Path:
    """The file of a finding that was written `number` seconds after the epoch."""
    path = kept_path("", {"number": str(number)}, folder)
    keep(path, {}, number=number)
    os.utime(path, (number, number))
    return path


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = kept_path("", KEY, tmp_path)
    os.mkfifo(path)
    assert read_kept(path, KEY) is None


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = kept_path("", KEY, tmp_path)
    keep(path, KEY, found=1)
    content = path.read_bytes()
    path.write_bytes(content.ljust(kept._MOST_BYTES))
    assert read_kept(path, KEY) == {"key": KEY, "found": 1}
    path.write_bytes(content.ljust(kept._MOST_BYTES + 1))
    assert read_kept(path, KEY) is None


def test_the_oldest_go_beyond_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_FILES", 3)
    half = tmp_path / "tmpabc_12.new"
    half.touch()
    os.utime(half, (0, 0))
    foreign = tmp_path / "notes.json"
    foreign.touch()
    os.utime(foreign, (0, 0))
    first, second = written(tmp_path, 1), written(tmp_path, 2)
    assert half.exists()
    third = written(tmp_path, 3)
    assert {*tmp_path.iterdir()} == {foreign, first, second, third}
    fourth = written(tmp_path, 4)
    assert {*tmp_path.iterdir()} == {foreign, second, third, fourth}


def test_the_oldest_go_beyond_so_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = written(tmp_path, 1).stat().st_size
    monkeypatch.setattr(kept, "MOST_FOLDER_BYTES", 2 * size)
    second = written(tmp_path, 2)
    assert len([*tmp_path.iterdir()]) == 2
    third = written(tmp_path, 3)
    assert {*tmp_path.iterdir()} == {second, third}
