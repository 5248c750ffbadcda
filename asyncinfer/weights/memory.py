"""Memory for weights: taking it, its bounds, and whether it holds a file already."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch

__all__ = ["empty", "host_bytes", "in_memory", "is_out_of_memory"]

#: Bytes of a huge page on most processors.
_HUGE: Final = 2 << 20
_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")
#: Linux's `cachestat`, since 6.5, which the C library has no function for: its number, and the
#: numbers of 64 bits that it takes and gives.
_CACHESTAT: Final = 451
_SPAN: Final = ctypes.c_uint64 * 2
_COUNTS: Final = ctypes.c_uint64 * 5


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty`, in huge pages for a large tensor on the host if the system gives them.

    Reading into new memory then takes one page fault instead of 512, and about half the time, and a
    matrix product needs fewer address look-ups. Only whole huge pages are asked for, so that no
    more memory is taken. Raises `MemoryError` if the system refuses the memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from error
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -flat.data_ptr() % _HUGE
    # A kernel without huge pages raises an error.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, skipped, size // _HUGE * _HUGE)
    return flat[skipped : skipped + size].view(dtype).view(shape)


def host_bytes() -> int:
    """Of the memory that this process may take, as its system tells: the machine's, or less where
    its control groups have a limit, as in a container. 0 where the system does not tell."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
    return min([machine, *_group_limits()])


def _group_limits() -> Iterator[int]:
    """The limits of the process's control group of version 2 and of those around it."""
    # A container may see its own group only, at the root.
    group = PurePosixPath("/")
    with contextlib.suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                group = PurePosixPath(line[3:])
    for each in (group, *group.parents):
        # Without a limit the file says "max", and the root of a machine has no such file.
        with contextlib.suppress(OSError, ValueError):
            yield int((_GROUPS / each.relative_to("/") / "memory.max").read_text())


def in_memory(handle: int) -> bool:
    """Whether the system holds each page of this file in memory. False where it does not tell."""
    call = _system_call()
    if call is None:
        return False
    size, counts = os.fstat(handle).st_size, _COUNTS()
    if call(_CACHESTAT, handle, ctypes.byref(_SPAN(0, size)), ctypes.byref(counts), 0):
        return False
    return counts[0] >= -(-size // mmap.PAGESIZE)


@functools.cache
def _system_call() -> Any:
    """The C library's `syscall`; None on systems whose numbers are others."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    found = ctypes.CDLL(None).syscall
    found.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    found.restype = ctypes.c_long
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory could not be allocated, on a device or on the host. torch
    has freed its own cache by then."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch raises a plain RuntimeError for memory of the host, pinned or not.
    return any(why in str(error) for why in ("can't allocate memory", "CUDA error: out of memory"))
