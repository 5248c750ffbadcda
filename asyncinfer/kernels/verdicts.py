"""Verdicts of earlier trials on this machine, kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from asyncinfer.kernels.kept import forget, keep, kept_path, read_kept
from asyncinfer.kernels.trial import Fault, TrialShapes
from asyncinfer.machine import read_lines, version

__all__ = ["Verdicts", "driver_version", "key_of"]

#: The most characters of a fault.
_MOST_TEXT: Final = 1_000


class Verdicts:
    """A verdict is a file named by a hash of everything that a trial depends on: the device, its
    driver, the compiler, the kernels' own source, the shapes.

    A damaged file is ignored. Only `lasting` faults are kept beside good verdicts: a missing
    compiler may be installed the next time.
    """

    def __init__(self, folder: Path | None = None, library: str = "") -> None:
        """`folder`: None takes the user's cache folder. `library` is the one whose kernels are
        tried, as it is installed; "": they are our own."""
        self._folder = folder
        self._library = library

    def path(self, shapes: TrialShapes, device: torch.device) -> Path:
        """The file of the verdict on these shapes."""
        return kept_path("kernel-trials", key_of(shapes, device, self._library), self._folder)

    def read(self, shapes: TrialShapes, device: torch.device) -> tuple[bool, Fault | None]:
        """Whether a verdict is kept, and the fault that it names."""
        key = key_of(shapes, device, self._library)
        path = kept_path("kernel-trials", key, self._folder)
        kept = read_kept(path, key)
        if kept is None or "fault" not in kept:
            return False, None
        reason = kept["fault"]
        if reason is None:
            return True, None
        if not isinstance(reason, str) or len(reason) > _MOST_TEXT:
            return False, None
        return True, Fault(f"{reason} (found before: {path})", lasting=True)

    def keep(self, shapes: TrialShapes, device: torch.device, fault: Fault | None) -> None:
        """Keep a lasting verdict, or forget the kept one. A folder that cannot be written to keeps
        nothing."""
        key = key_of(shapes, device, self._library)
        path = kept_path("kernel-trials", key, self._folder)
        if fault is not None and not fault.lasting:
            forget(path)
        else:
            keep(path, key, fault=None if fault is None else fault.reason[:_MOST_TEXT])


def key_of(shapes: Any, device: torch.device, library: str = "") -> dict[str, str]:
    """Everything that a finding about kernels depends on. `shapes` is a dataclass."""
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        name = f"{about.name} {about.major}.{about.minor}"
    else:
        name = device.type
    return {
        "device": name,
        "driver": driver_version() or "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": version("triton") or "",
        "ptxas": os.environ.get("TRITON_PTXAS_PATH", ""),
        "kernels": _source(),
        "library": f"{library} {version(library)}" if library else "",
        "shapes": ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(shapes).items()),
    }


def _source() -> str:
    """A hash of the kernels' source, which may change within a version of the package."""
    digest = hashlib.sha256((version("asyncinfer") or "").encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def driver_version() -> str | None:
    """The version of NVIDIA's driver, where Linux tells it, and of the CUDA that it supports; None
    without a driver."""
    found = [line.strip() for line in read_lines(Path("/proc/driver/nvidia/version"))[:1]]
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    number = ctypes.c_int()
    with suppress(OSError, AttributeError):
        if ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(number)) == 0:
            found.append(f"CUDA {number.value // 1000}.{number.value % 1000 // 10}")
    return ", ".join(found) or None
