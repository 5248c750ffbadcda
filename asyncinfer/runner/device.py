"""Which device and dtype an engine runs on, and on how many threads."""

from __future__ import annotations

import threading
from typing import Final

import torch

from asyncinfer.attention import KVFormat, kv_format
from asyncinfer.errors import ModelLoadError

__all__ = ["choose_device", "choose_dtype", "choose_kv", "use_cpu_threads"]

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is CUDA where there is one. Raises `ModelLoadError`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device={name!r}: is no torch device") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device={name!r}: must be cpu or cuda")
    if device.type == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= there:
            raise ModelLoadError(f"device={name!r}: there are {there} CUDA devices")
        if ":" not in name:
            # With an index, so that threads with another current device mean the same.
            device = torch.device("cuda", torch.cuda.current_device())
    return device


def choose_dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" is the checkpoint's on a GPU and float32 on a CPU."""
    if name == "auto":
        name = (stored or "float32") if device.type == "cuda" else "float32"
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ModelLoadError(f"dtype={name!r}: must be auto or one of {', '.join(_DTYPES)}")
    return dtype


def choose_kv(name: str, device: torch.device) -> KVFormat:
    """The format of KV called `name`, if the device has what it takes. Raises `ModelLoadError`."""
    if name == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            have = ".".join(map(str, capability))
            raise ModelLoadError(
                f"kv='fp8': needs a GPU of compute capability 8.9, {device} has {have}; 'int8' "
                "takes as few bytes"
            )
    return kv_format(name)


def use_cpu_threads(count: int) -> None:
    """Run the operators of this thread on `count` threads; every other thread keeps its number.

    torch has a number per thread and one for threads that have not used it yet, and sets both
    at once: a thread that ends at once sets the second one back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()
