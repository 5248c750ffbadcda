"""Low-rank adapters on a CPU, by code compiled for this machine's processor."""

from __future__ import annotations

import ctypes
import functools
import time

import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.native.host import Host, compiled, compiled_once, host
from asyncinfer.kernels.native.lora_code import FIELDS, lora_code
from asyncinfer.kernels.native.threads import ThreadChoices, parallel_region

__all__ = ["LoraKernel", "lora_kernel"]

_Task = ctypes.c_int64 * len(FIELDS)
#: Numbers of both matrices times rows below which another thread costs more than it saves.
_SHARED = 1 << 15
_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


class LoraKernel:
    """`lora_add` for rows that the host knows, with matrices of one dtype. Each row is computed by
    itself, so neither other rows nor the number of threads change a bit of it."""

    __slots__ = ("_add", "_choices", "_dtype")

    def __init__(self, dtype: torch.dtype, target: Host, region: int) -> None:
        """`region`: the address of OpenMP's `GOMP_parallel`. Raises `RuntimeError` where the code
        cannot be made."""
        self._dtype = dtype
        self._choices = ThreadChoices()
        kind = str(dtype).removeprefix("torch.")
        text = functools.partial(lora_code, kind, target.lanes)
        symbols = {"GOMP_parallel": region}
        (address,) = compiled(f"lora {kind}", text, target, ("add",), symbols)
        self._add = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        ranks: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        *,
        sizes: tuple[int, ...],
    ) -> None:
        """As `reference.lora_add`, for the rows of `y` and `x` that `rows` int64 `[n]` names, each
        once. The slots of these rows are `slots` int64 `[n]`, none of them -1. `down` and `up` are
        contiguous, and may have another dtype than `x` and `y`."""
        assert x.dtype is y.dtype
        assert down.dtype is up.dtype is self._dtype
        count, parts = len(rows), len(sizes)
        most, inputs, outputs = up.shape[1], x.shape[1], y.shape[1]
        own = y.dtype is torch.float32 and y.stride(1) == 1
        whole = y if own else y.float().contiguous()
        x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        columns = (ctypes.c_int64 * parts)(*sizes)
        began = time.perf_counter()
        threads, choice = 1, None
        if most * (parts * inputs + outputs) * count > _SHARED:
            threads = min(count, torch.get_num_threads())
        if threads > 1:
            choice = self._choices.of(outputs, inputs, count)
            threads = threads if choice.shares(began) else 1
        task = _Task(
            down.data_ptr(),
            up.data_ptr(),
            ranks.data_ptr(),
            x.data_ptr(),
            whole.data_ptr(),
            rows.data_ptr(),
            slots.data_ptr(),
            ctypes.addressof(columns),
            count,
            parts,
            inputs,
            outputs,
            most,
            x.stride(0),
            whole.stride(0),
            threads,
            0,
        )
        self._add(ctypes.addressof(task))
        if choice is not None:
            choice.took(threads > 1, began, time.perf_counter())
        if not own:
            y.copy_(whole)


def lora_kernel(dtype: torch.dtype) -> LoraKernel | None:
    """The kernel for matrices of this dtype, compiled by its first caller. None without `llvmlite`,
    on other processors, and where torch's threads cannot be used."""
    target, region = host(), parallel_region()
    if target is None or region is None or str(dtype) not in _DTYPES:
        return None
    return trusted_kernel(dtype, target, region)


@compiled_once
def trusted_kernel(dtype: torch.dtype, target: Host, region: int) -> LoraKernel | None:
    """The kernel, if a trial is right."""
    kernel = LoraKernel(dtype, target, region)
    return kernel if _is_right(kernel, dtype) else None


def _is_right(kernel: LoraKernel, dtype: torch.dtype) -> bool:
    """Whether a few rows agree with torch's results."""
    generator = torch.Generator().manual_seed(3)
    sizes, inputs, most = (37, 16), 45, 6

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    x, y = some(3, inputs), some(3, sum(sizes))
    down, up = some(2, most * len(sizes), inputs), some(2, most, sum(sizes))
    ranks = torch.tensor([5, most], dtype=torch.int32)
    slots = torch.tensor([1, -1, 0], dtype=torch.int32)
    right = reference.lora_add(y.clone(), x, down, up, ranks, slots, sizes=sizes).float()
    rows = torch.tensor([2, 0])
    kernel(y, x, down, up, ranks, slots[rows].long(), rows, sizes=sizes)
    off = (y.float() - right).abs().amax()
    return bool(off <= (1e-5 if dtype is torch.float32 else 1e-2) * right.abs().amax())
