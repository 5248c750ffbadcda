"""`Machine`: the processor, memory and libraries that a process has."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch

from asyncinfer.kernels.verdicts import driver_version
from asyncinfer.machine import (
    allowed_cores,
    cpu_model,
    cpu_quota,
    cpuinfo,
    fast_cores,
    read_lines,
    usable_cores,
    version,
)

__all__ = ["Machine"]

#: Flags of `/proc/cpuinfo` that decide how fast products are, x86-64's and arm64's.
_INSTRUCTIONS: Final = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512vbmi"),
    *("avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
#: Libraries that the engine computes, compiles, tokenises and constrains with.
_LIBRARIES: Final = (
    *("asyncinfer", "torch", "triton", "llvmlite", "numpy"),
    *("tokenizers", "llguidance", "safetensors", "gguf"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a process may use."""

    processor: str
    #: Such as "x86_64".
    architecture: str
    cores: int
    #: Cores that the process's affinity lets it run on.
    usable_cores: int
    #: How many of these are fast; None: all are alike.
    fast_cores: int | None
    #: Cores' worth of time that its control group gives it; None: no limit.
    quota: float | None
    #: Bytes; None where the system does not say.
    memory: int | None
    available_memory: int | None
    #: Instruction sets that matter to products, by Linux's names.
    instructions: tuple[str, ...]
    #: Processes that wanted a core, on average over the last minute; None where nobody counts.
    load: float | None
    python: str
    platform: str
    #: Library -> version, None where it is not installed.
    libraries: Mapping[str, str | None]
    #: Each CUDA device's name, capability and memory.
    gpus: tuple[str, ...]
    #: NVIDIA's driver; None where there is none.
    driver: str | None
    #: The C compiler that Triton compiles its launchers with; None where there is none.
    compiler: str | None

    @classmethod
    def now(cls) -> Self:
        """The machine of this process."""
        memory = _memory()
        return cls(
            processor=cpu_model(),
            architecture=platform.machine(),
            cores=os.cpu_count() or 1,
            usable_cores=usable_cores(),
            quota=cpu_quota(),
            fast_cores=fast_cores(allowed_cores()),
            memory=memory.get("MemTotal"),
            available_memory=memory.get("MemAvailable"),
            instructions=_instructions(),
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            python=f"{platform.python_implementation()} {platform.python_version()}",
            platform=platform.platform(),
            libraries={name: version(name) for name in _LIBRARIES},
            gpus=_gpus(),
            driver=driver_version(),
            compiler=_compiler(),
        )

    @property
    def free_cores(self) -> float:
        """Cores that the process can keep busy: affinity and quota allow no more."""
        return self.usable_cores if self.quota is None else min(self.usable_cores, self.quota)


def _instructions() -> tuple[str, ...]:
    about = cpuinfo()
    flags = set((about.get("flags") or about.get("Features") or "").split())
    return tuple(name for name in _INSTRUCTIONS if name in flags)


def _memory() -> dict[str, int]:
    """Bytes by the names of `/proc/meminfo`."""
    found = {}
    for line in read_lines(Path("/proc/meminfo")):
        name, _, value = line.partition(":")
        if value.endswith(" kB") and value[:-3].strip().isdigit():
            found[name] = int(value[:-3]) << 10
    return found


def _compiler() -> str | None:
    """The C compiler, looked for as Triton does."""
    named = os.environ.get("CC")
    found = (shutil.which(name) for name in ((named,) if named else ("gcc", "clang", "cc")))
    return next((path for path in found if path is not None), None)


def _gpus() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(
            f"{about.name}, capability {about.major}.{about.minor}, "
            f"{about.total_memory / 2**30:.0f} GiB"
        )
    return tuple(found)
