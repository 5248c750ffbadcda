"""Which device, dtype and kernels an engine runs on, and on how many threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch

from asyncinfer.attention import KVCache, KVFormat, StateCache, kv_format, reads_pages
from asyncinfer.config import EngineConfig, Graphs
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels.dispatch import distrust, distrusted, use_triton
from asyncinfer.kernels.flashinfer import flashinfer_is_missing
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.threads import name_thread, set_thread_count
from asyncinfer.kernels.trial import TrialShapes
from asyncinfer.kernels.trust import find_flashinfer_fault, find_triton_fault
from asyncinfer.machine import allowed_cores, cpu_quota, fast_cores
from asyncinfer.models import ModelConfig
from asyncinfer.runner.fallbacks import Fallbacks

__all__ = [
    "check_attention",
    "choose_attention",
    "choose_device",
    "choose_dtype",
    "choose_graphs",
    "choose_kernels",
    "choose_kv",
    "prepare_threads",
    "trial_shapes",
    "use_cpu_threads",
]

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
            # With an index, so that it names the same device on threads with another current one.
            device = torch.device("cuda", torch.cuda.current_device())
    return device


def choose_dtype(
    name: str,
    stored: str | None,
    device: torch.device,
    cpu_halves: Callable[[], bool] = lambda: False,
) -> torch.dtype:
    """The dtype called `name`. "auto" is the checkpoint's on a GPU; on a CPU it is float32, unless
    the checkpoint is in bfloat16 and `cpu_halves` says that the CPU is faster in it. GPUs before
    Ampere (compute capability 8.0) have no bfloat16, and take float16 instead."""
    if name == "auto":
        name = (stored or "float32").removeprefix("torch.")
        if device.type != "cuda":
            name = name if name == "bfloat16" and cpu_halves() else "float32"
        elif name == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
            name = "float16"
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ModelLoadError(f"dtype={name!r}: must be auto or one of {', '.join(_DTYPES)}")
    return dtype


def choose_kv(name: str, device: torch.device) -> KVFormat:
    """The KV format called `name`. Raises `ModelLoadError` where the device does not support it."""
    if name == "int4" and device.type != "cpu":
        raise ModelLoadError(f"kv='int4': needs a CPU, this is {device}; 'int8' runs on all")
    if name == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            have = ".".join(map(str, capability))
            raise ModelLoadError(
                f"kv='fp8': needs a GPU of compute capability 8.9, {device} has {have}; 'int8' "
                "takes as few bytes"
            )
    return kv_format(name)


def trial_shapes(
    model: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    layouts: tuple[WeightLayout, ...] = (),
) -> TrialShapes:
    """The shapes with which kernels are tried for a model, whose keys and values are of `kv_dtype`,
    and whose quantised weights have `layouts`."""
    return TrialShapes(
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab=model.vocab_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        layouts=layouts,
    )


def choose_kernels(config: EngineConfig, shapes: TrialShapes, device: torch.device) -> str | None:
    """Have this thread's operators run the kernels that `config` asks for. Returns the fault of
    Triton's kernels, which "auto" then does without.

    Kernels that are wrong for one model are not used for another one on this thread, which a draft
    model and its large model share. Raises `ModelLoadError` if "triton" was asked for and has a
    fault.
    """
    name = config.kernels
    if device.type != "cuda":
        if name == "triton":
            raise ModelLoadError(f"kernels='triton': needs a GPU, this is {device}")
        return None
    if name == "torch":
        use_triton(False)
        return None
    fault = distrusted()
    if fault is None:
        use_triton(True)
        fault = find_triton_fault(shapes, device, config.kernel_trial)
    if fault is None:
        return None
    if name == "triton":
        raise ModelLoadError(f"kernels='triton': {fault}")
    distrust(fault)
    return fault


def check_attention(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `ModelLoadError` where FlashInfer was asked for and cannot be had."""
    if config.attention != "flashinfer":
        return
    lacking = None
    if device.type != "cuda":
        lacking = f"needs a GPU, this is {device}"
    elif dtype is torch.float32:
        lacking = "needs dtype='float16' or 'bfloat16', this is float32"
    lacking = lacking or flashinfer_is_missing()
    if lacking is not None:
        raise ModelLoadError(f"attention='flashinfer': {lacking}")


def choose_attention(
    config: EngineConfig, shapes: TrialShapes, device: torch.device
) -> tuple[EngineConfig, str | None]:
    """`config` unchanged, or without FlashInfer and with FlashInfer's fault."""
    if config.attention != "flashinfer":
        return config, None
    fault = find_flashinfer_fault(shapes, device, config.kernel_trial)
    return (config, None) if fault is None else (config.replace(attention="auto"), fault)


def choose_graphs(
    config: EngineConfig,
    kv: Sequence[KVCache | StateCache],
    groups: Sequence[int],
    fallbacks: Fallbacks,
    *,
    predicts: bool = False,
) -> Graphs:
    """When a GPU records steps over the caches `kv` of these `groups`: as `config` says if Triton's
    kernels attend over all of them that hold KV, else never, which is a fallback unless `config`
    asked for it. Of a model that `predicts` further tokens only the layers are recorded.

    Torch's operators are not recorded: `reference.paged_attention` and `reference.kv_write` need
    numbers on the host, and masked attention reads the whole width of every table.
    """
    wanted = config.cuda_graphs
    # A recorded step has one cache for each group; recorded layers may have several.
    alone = predicts or len(set(groups)) == len(groups)
    if wanted == "off" or (alone and all(isinstance(c, StateCache) or reads_pages(c) for c in kv)):
        return wanted
    if config.kernels != "torch" and not config.deterministic:
        fallbacks.add("graphs", "not all of its attention is by Triton's kernels")
    return "off"


def prepare_threads(config: EngineConfig, device: torch.device) -> None:
    """Set how many threads the operators of this thread take on a CPU at most: `cpu_threads`, else
    torch's number, but no more than a container has of cores' time, and none for the slow cores of
    a processor that has fast ones: a region of threads ends with its slowest one. Call it before
    the thread's first operator."""
    if device.type != "cpu":
        return
    name_thread()
    count = config.cpu_threads
    if count is None:
        limits = (cpu_quota(), fast_cores(allowed_cores()))
        least = min((limit for limit in limits if limit is not None), default=None)
        if least is not None and least < torch.get_num_threads():
            count = max(1, int(least))
    if count is not None:
        use_cpu_threads(count)


def use_cpu_threads(count: int) -> None:
    """Run this thread's operators on `count` threads; all other threads keep their numbers.

    torch has a number per thread and one for threads that have not used it yet, and sets both at
    once. Where its library cannot be told directly, a thread that ends at once sets the second one
    back.
    """
    if set_thread_count(count):
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()
