"""`empty`: tensors in huge pages, which are given back. `in_memory`: what the system holds of a
file."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncinfer.weights import memory
from asyncinfer.weights.memory import empty, in_memory

CPU = torch.device("cpu")
HUGE = 2 << 20


def mapping(address: int) -> tuple[int, int, set[str]] | None:
    """Where the process's mapping with this address begins and ends, and its flags."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = tuple(int(end, 16) for end in span.groups())
        elif line.startswith("VmFlags:") and found and found[0] <= address < found[1]:
            return *found, set(line.split()[1:])
    return None


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1 << 20, 2), (7, 300_000), (3, 1 << 21)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty(shape, dtype, CPU)
    plain = torch.empty(shape, dtype=dtype)
    assert (tensor.shape, tensor.dtype, tensor.device) == (plain.shape, dtype, CPU)
    assert tensor.stride() == plain.stride()
    tensor.fill_(3.0)
    assert torch.equal(tensor, plain.fill_(3.0))


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here"
)
def test_whole_pages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = empty((2 * HUGE + 4096,), torch.uint8, CPU)
    start = tensor.data_ptr()
    assert start % HUGE == 0
    found = mapping(start)
    assert found is not None
    assert "hg" in found[2]
    assert (found[0], found[1]) == (start, start + 2 * HUGE)
    del tensor
    assert mapping(start) != found
    # What would not fill one is torch's own affair.
    monkeypatch.delattr(mmap, "mmap")
    assert empty((HUGE - 1,), torch.uint8, CPU).fill_(1).sum() == HUGE - 1


def test_a_system_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert empty((HUGE,), torch.uint8, CPU).fill_(1).sum() == HUGE


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has it")
def test_a_kernel_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *args: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert empty((HUGE,), torch.uint8, CPU).fill_(1).sum() == HUGE


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has it")
def test_a_container_has_less_memory_than_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = memory.host_bytes()
    assert machine > 0
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    everything = memory.host_bytes()
    assert everything >= machine
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/x\n0::/outer/inner\n")
    (inner / "memory.max").write_text("max\n")
    assert memory.host_bytes() == everything
    (inner.parent / "memory.max").write_text("4096\n")
    assert memory.host_bytes() == 4096
    (inner / "memory.max").write_text("1024\n")
    assert memory.host_bytes() == 1024


def test_more_than_there_is() -> None:
    with pytest.raises(MemoryError, match="1125899906842624 bytes"):
        empty((1 << 50,), torch.uint8, CPU)


def test_pages_that_the_system_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(bytes(3 * HUGE + 5))
        os.fsync(file.fileno())
    with path.open("rb", buffering=0) as file:
        handle = file.fileno()
        if not in_memory(handle):
            pytest.skip("this system does not tell")
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        dropped = not in_memory(handle)
        while file.read(HUGE):
            pass
        assert in_memory(handle)
        for answer in (None, lambda *_: -1):
            monkeypatch.setattr(memory, "_system_call", lambda found=answer: found)
            assert not in_memory(handle)
        if not dropped:
            pytest.skip("this file system keeps all pages")
