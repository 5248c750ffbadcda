"""What trials found on this machine before, in the user's cache folder."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from platformdirs import user_cache_path

from asyncinfer.kernels.trial import Fault, TrialShapes
from asyncinfer.machine import read_lines, version

__all__ = ["Verdicts", "driver_version"]

#: Bytes of a file, and characters of what is wrong; a file of ours is far from both.
_MOST_BYTES: Final = 16_384
_MOST_TEXT: Final = 1_000


class Verdicts:
    """A verdict is a file, named by a hash of all that decides what a trial finds: the device, its
    driver, the compiler, the kernels' own source, the shapes.

    A file that is not as this wrote it counts as none. Kept are kernels that are right, and faults
    that are `lasting`: a missing compiler may be there the next time.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: None takes the user's cache folder."""
        self._folder = folder

    def path(self, shapes: TrialShapes, device: torch.device) -> Path:
        """Where the verdict on these shapes is kept."""
        text = json.dumps(_key(shapes, device), sort_keys=True)
        folder = self._folder or user_cache_path("asyncinfer") / "kernel-trials"
        return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def read(self, shapes: TrialShapes, device: torch.device) -> tuple[bool, Fault | None]:
        """Whether a verdict is kept, and the fault that it names."""
        path = self.path(shapes, device)
        try:
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                return False, None
            kept = json.loads(data)
            if kept["key"] != _key(shapes, device):
                return False, None
            reason = kept["fault"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False, None
        if reason is None:
            return True, None
        if not isinstance(reason, str) or len(reason) > _MOST_TEXT:
            return False, None
        return True, Fault(f"{reason} (found before: {path})", lasting=True)

    def keep(self, shapes: TrialShapes, device: torch.device, fault: Fault | None) -> None:
        """Keep a verdict if it lasts; another one that was kept goes. A folder that cannot be
        written to keeps nothing."""
        path = self.path(shapes, device)
        with suppress(OSError):
            if fault is not None and not fault.lasting:
                path.unlink(missing_ok=True)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            reason = None if fault is None else fault.reason[:_MOST_TEXT]
            text = json.dumps({"key": _key(shapes, device), "fault": reason}, indent=1)
            # Whole or not at all, also for a process that reads it at this moment.
            handle, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(name, path)
            except OSError:
                os.unlink(name)
                raise


def _key(shapes: TrialShapes, device: torch.device) -> dict[str, str]:
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
        "shapes": ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(shapes).items()),
    }


def _source() -> str:
    """A hash of the kernels' source, which may change within a version of the package."""
    digest = hashlib.sha256((version("asyncinfer") or "").encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def driver_version() -> str | None:
    """Of NVIDIA's driver: its own version where Linux tells it, and that of the CUDA that it can
    run; None where there is no driver."""
    found = [line.strip() for line in read_lines(Path("/proc/driver/nvidia/version"))[:1]]
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    number = ctypes.c_int()
    with suppress(OSError, AttributeError):
        if ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(number)) == 0:
            found.append(f"CUDA {number.value // 1000}.{number.value % 1000 // 10}")
    return ", ".join(found) or None
