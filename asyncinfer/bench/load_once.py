"""One load of a checkpoint, in a process of its own: how long it takes, and what the host holds.

Every loader ends in the same state: each parameter in memory of its own, in the dtype asked for.
This engine's loader does so by itself. The other loaders only map files on a CPU, so their tensors
are copied.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

__all__ = [
    "BYTES",
    "ENGINE",
    "LOADERS",
    "READ",
    "SECOND",
    "TimedLoad",
    "load_once",
    "weight_files",
]

ENGINE: Final = "asyncinfer, engine"
READ: Final = "read"
#: Those of a copy of the weights in a CPU's layout.
SECOND: Final = "asyncinfer, second start"
BYTES: Final = "its bytes, mapped"

#: Windows can only start a Python anew.
_FORKS: Final = "forkserver" in multiprocessing.get_all_start_methods()
#: More than any model has.
_MOST_COPIES: Final = 1 << 50
_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class TimedLoad:
    """One load."""

    #: Of the clock, and of all threads of the process.
    seconds: float
    cpu_seconds: float
    #: The most bytes of host memory during the load, less those before it. A page of a mapped file
    #: counts once it was read.
    peak_bytes: int


def load_once(
    loader: str, folder: Path, warm_up: Path, device: str, dtype: str, copies: Path | None = None
) -> TimedLoad:
    """Load `folder` by one of `LOADERS`, in a new process that has loaded `warm_up` before. So the
    time includes neither imports nor a GPU's context, nor what `_touch` does. `copies`: where
    `SECOND` and `BYTES` have their copies; None for others."""
    context = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
    if _FORKS:
        # torch is imported once for all of them.
        context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_load, loader, folder, warm_up, device, dtype, copies).result()


def _load(
    loader: str, folder: Path, warm_up: Path, device: str, dtype: str, copies: Path | None
) -> TimedLoad:
    load = partial(LOADERS[loader], device=torch.device(device), dtype=getattr(torch, dtype))
    if copies is None:
        load(warm_up)
    else:
        load(warm_up, copies=copies / "warm-up")
        load = partial(load, copies=copies / "model")
    if device == "cpu" and copies is None:
        _touch(sum(path.stat().st_size for path in weight_files(folder)) * 5 // 4)
    # Else objects imported in the warm-up may be collected in the middle of the load.
    gc.collect()
    before = _memory(reset=True)
    began, cpu = time.perf_counter(), time.process_time()
    # The clock is read before the model is let go.
    loaded = load(folder)
    if device != "cpu":
        torch.cuda.synchronize()
    run = TimedLoad(
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - cpu,
        peak_bytes=max(0, _memory() - before),
    )
    if loader == ENGINE:
        loaded.close()
    del loaded
    return run


def weight_files(model: Path) -> list[Path]:
    """The files with weights in a checkpoint's folder; a GGUF file itself."""
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]


def _touch(size: int) -> None:
    """Take so many bytes and let them go. The host of a virtual machine takes free memory back, and
    returns it a page at a time when it is touched. That may take several times as long as a load,
    and would fall on the first loader."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, size, flags=flags) as memory:
        # In huge pages, which large and small blocks are cut from; a kernel may have none.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory[::4096] = bytes(len(range(0, size, 4096)))


def _asyncinfer(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """The whole decoder: fused weights in place, a CPU's laid out for its matrix products."""
    from asyncinfer.models import load_model

    return load_model(folder, device, dtype)


def _weights(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """The decoder's weights, fused, before a device lays them out."""
    from asyncinfer.models import load_weights

    return load_weights(folder, device, dtype)


def _engine(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Open all that the first prompt needs: weights, tokenizer, KV cache, threads."""
    from asyncinfer import SyncEngine

    engine = SyncEngine(folder, device=device.type, dtype=str(dtype).removeprefix("torch."))
    return engine.__enter__()


def _read(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Read the files' bytes with one thread into new memory of their size."""
    content = []
    for path in weight_files(folder):
        memory = torch.empty(path.stat().st_size, dtype=torch.uint8)
        left = memory.numpy().data
        with path.open("rb", buffering=0) as file:
            while left and (count := file.readinto(left)):
                left = left[count:]
        content.append(memory)
    return content


def _mapped(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """On a CPU safetensors maps the files. One byte of each page is looked at."""
    tensors = _load_file(folder, device)
    for tensor in tensors.values():
        tensor.view(-1).view(torch.uint8)[::4096].sum()
    return tensors


def _copied(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """On a CPU each tensor is copied, since what is mapped is not loaded yet."""
    tensors = _load_file(folder, device)
    copy = device.type == "cpu"
    for name in tensors:
        tensors[name] = tensors[name].to(dtype, copy=copy)
    return tensors


def _load_file(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path, device=str(device))
    return tensors


def _transformers(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """On a CPU each tensor is copied, since it may be mapped. A GPU gets its tensors straight away
    where accelerate is installed."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    from transformers.utils.import_utils import is_accelerate_available

    logging.disable_progress_bar()
    straight = device.type != "cpu" and is_accelerate_available()
    options = {"device_map": device} if straight else {}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    if device.type != "cpu":
        return model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _second(folder: Path, *, device: torch.device, dtype: torch.dtype, copies: Path) -> Any:
    """The whole decoder, of a copy that is written where there is none."""
    from asyncinfer.models import WeightCache, load_model

    return load_model(folder, device, dtype, cache=WeightCache(_MOST_COPIES, copies))


def _bytes(folder: Path, *, device: torch.device, dtype: torch.dtype, copies: Path) -> Any:
    """Map the copy, and look at each of its bytes once."""
    found = []
    for path in copies.glob("*"):
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        found.append(torch.frombuffer(mapped, dtype=torch.int32))
        found[-1].amax()
    return found


LOADERS: Final[dict[str, Callable[..., Any]]] = {
    "asyncinfer": _asyncinfer,
    "asyncinfer, weights alone": _weights,
    "load_file": _copied,
    "load_file, mapped": _mapped,
    "from_pretrained": _transformers,
    ENGINE: _engine,
    READ: _read,
    SECOND: _second,
    BYTES: _bytes,
}


def _memory(*, reset: bool = False) -> int:
    """The most bytes that the process has held in memory. On Linux a reset makes it what is held
    now."""
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if reset:
        _CLEAR.write_text("5")
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
