"""Machine code that is kept between processes: only what this user wrote is ever run."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from asyncinfer.kernels.native import calls, packed_kernel
from asyncinfer.kernels.native import packed as module
from asyncinfer.kernels.native.host import compiled, host
from asyncinfer.kernels.native.kept_code import kept_code, source_hash
from asyncinfer.kernels.native.packed import PackedKernel
from asyncinfer.kernels.native.packed_blocks import Layout
from asyncinfer.kernels.native.threads import parallel_region

LAYOUT = Layout("q4_0", 32)
KEY = {"code": "a", "processor": "b"}
CODE = b"as LLVM made it"


def never() -> bytes:
    raise AssertionError("made again")


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_code_is_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert kept_code(KEY, lambda: CODE, folder) == CODE
    assert kept_code(KEY, never, folder) == CODE
    assert kept_code({**KEY, "code": "c"}, lambda: b"other", folder) == b"other"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())


@pytest.mark.parametrize("change", ["a bit of it", "its hash", "its end", "all of it", "more"])
def test_a_file_that_was_changed_is_made_anew(tmp_path: Path, change: str) -> None:
    kept_code(KEY, lambda: CODE, tmp_path)
    path = only(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "a bit of it": whole[:-1] + bytes([whole[-1] ^ 1]),
            "its hash": bytes([whole[0] ^ 1]) + whole[1:],
            "its end": whole[:-1],
            "all of it": b"",
            "more": whole + b"\0",
        }[change]
    )
    assert kept_code(KEY, lambda: CODE, tmp_path) == CODE
    assert path.read_bytes() == whole


def test_code_of_another_key_is_not_taken(tmp_path: Path) -> None:
    """Its hash is right, and it lies where this key's code would be."""
    kept_code(KEY, lambda: CODE, tmp_path)
    path = only(tmp_path)
    other = tmp_path / "other"
    kept_code({**KEY, "processor": "c"}, lambda: b"for another processor", other)
    os.replace(only(other), path)
    assert kept_code(KEY, lambda: CODE, tmp_path) == CODE


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_what_others_may_write_to_is_not_run(tmp_path: Path, mode: int) -> None:
    kept_code(KEY, lambda: CODE, tmp_path)
    only(tmp_path).chmod(mode)
    made: list[bytes] = []
    assert kept_code(KEY, lambda: made.append(CODE) or CODE, tmp_path) == CODE  # type: ignore[func-returns-value]
    assert made
    assert only(tmp_path).stat().st_mode & 0o777 == 0o600


def test_what_another_user_wrote_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_code(KEY, lambda: b"theirs", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: only(tmp_path).stat().st_uid + 1)
    assert kept_code(KEY, lambda: CODE, tmp_path) == CODE


def test_links_and_folders_are_not_read(tmp_path: Path) -> None:
    kept_code(KEY, lambda: CODE, tmp_path / "there")
    path = only(tmp_path / "there")
    moved = path.rename(tmp_path / "moved")
    path.symlink_to(moved)
    made: list[bytes] = []
    kept_code(KEY, lambda: made.append(CODE) or CODE, tmp_path / "there")  # type: ignore[func-returns-value]
    assert made
    path.unlink()
    path.mkdir()
    assert kept_code(KEY, lambda: CODE, tmp_path / "there") == CODE


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert kept_code(KEY, lambda: CODE, tmp_path / "file" / "folder") == CODE


def test_code_is_never_half_there(tmp_path: Path) -> None:
    """A process that ends while it writes leaves no file of that name."""

    def fails() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept_code(KEY, fails, tmp_path)
    assert not list(tmp_path.iterdir())


def test_several_writers_at_once(tmp_path: Path) -> None:
    """Each takes what it made itself, and what is left is whole."""
    together = threading.Barrier(4)

    def made() -> bytes:
        together.wait(30)
        return CODE

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: kept_code(KEY, made, tmp_path), range(4)))
    assert found == [CODE] * 4
    assert kept_code(KEY, never, tmp_path) == CODE
    assert only(tmp_path).suffix == ".o"


@pytest.mark.skipif(packed_kernel(LAYOUT) is None, reason="no kernel for this machine")
def test_kept_code_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, region = host(), parallel_region()
    assert target is not None
    monkeypatch.setattr(calls, "compiled", partial(compiled, folder=tmp_path))
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 192, (96, 8, 18), generator=generator, dtype=torch.uint8) & 0xBF
    x = torch.randn(9, 256, generator=generator)
    made = PackedKernel(LAYOUT, target, region)(x, blocks, 1.0)
    monkeypatch.setattr(module, "packed_code", never)
    kept = PackedKernel(LAYOUT, target, region)(x, blocks, 1.0)
    assert torch.equal(made, kept)


def test_the_source_is_part_of_the_key() -> None:
    assert len(source_hash()) == 64
