"""A trial of Triton's kernels on a device, before a model's weights are loaded there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.figures import KernelFigures, Stopwatch

__all__ = ["Fault", "TrialShapes", "find_fault"]

#: Largest error beside the reference in float32, as a share of the largest number.
_ALLOWED: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_SEED: Final = 20_251
_BLOCK: Final = 16
#: Tokens of sequences: on both sides of a block, of a tile, and many of both.
_LENGTHS: Final = (1, 15, 16, 17, 130, 300)
#: Tokens of a product: one for each kind of tile.
_ROWS: Final = (1, 4, 16, 64)

_Case = Callable[[ModuleType, torch.dtype], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialShapes:
    """A model's own shapes: what compiles for them is what its steps run."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    #: Of activations and weights, and of keys and values.
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a kernel."""

    reason: str
    #: Whether the next trial will find it, too. What cannot be compiled today may be tomorrow, once
    #: somebody has installed a compiler.
    lasting: bool

    def __str__(self) -> str:
        return self.reason


def find_fault(
    shapes: TrialShapes,
    device: torch.device,
    kernels: ModuleType | None = None,
    *,
    told: Callable[[str], object] = lambda kernel: None,
    measured: Callable[[KernelFigures], object] | None = None,
) -> Fault | None:
    """What is wrong with the first of `kernels` (None: Triton's) that cannot be run on `device`,
    differs from the reference kernels in float32, or from itself when it is run again. None: all
    are right, as far as a trial can tell. `told` is called with the name of each before it runs,
    and `measured` with what there is to say of each that is right; None: nothing is timed."""
    tried = "Triton"
    try:
        module = kernels or import_module("asyncinfer.kernels.triton")
        # Triton launches on the thread's current device, wherever the tensors are.
        there = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with there, torch.inference_mode():
            watch = None if measured is None else _stopwatch(module, device)
            for tried, case in _cases(shapes, device):
                told(tried)
                found = _judged(tried, case, shapes.dtype, module)
                if isinstance(found, str):
                    return Fault(found, lasting=True)
                if measured is not None:
                    measured(_figures(tried, found, case, shapes.dtype, watch))
    except Exception as error:
        # Whatever a compiler, a driver or a device raises.
        lines = str(error).strip().splitlines() or [""]
        return Fault(f"{tried}: {type(error).__name__}: {lines[-1][:200]}", lasting=False)
    return None


def _judged(name: str, case: _Case, dtype: torch.dtype, kernels: ModuleType) -> str | float:
    """What is wrong with a kernel, or else its largest error."""
    largest = 0.0
    found, again = case(kernels, dtype), case(kernels, dtype)
    for one, other, right in zip(found, again, case(reference, torch.float32), strict=True):
        if not torch.equal(one, other):
            return f"{name} gives other numbers when it is run again"
        if not right.is_floating_point():
            if not torch.equal(one, right):
                return f"{name} is wrong"
            continue
        error = float((one.float() - right).abs().max() / right.abs().max())
        # An error that is no number is wrong, too.
        if not error <= _ALLOWED[dtype]:
            return f"{name} is wrong by {error:.1e} of its largest number"
        largest = max(largest, error)
    return largest


def _stopwatch(kernels: ModuleType, device: torch.device) -> Stopwatch | None:
    try:
        return Stopwatch(kernels, device)
    except torch.OutOfMemoryError:
        # What cannot be timed is no less right.
        return None


def _figures(
    name: str, error: float, case: _Case, dtype: torch.dtype, watch: Stopwatch | None
) -> KernelFigures:
    seconds = floor = None
    if watch is not None:
        case(watch, dtype)
        seconds, floor = watch.seconds, watch.floor
    return KernelFigures(
        kernel=name, error=error, allowed=_ALLOWED[dtype], seconds=seconds, floor=floor
    )


class _Numbers:
    """Random tensors that are the same in each run, rounded to the dtype of the trial."""

    def __init__(self, device: torch.device, dtype: torch.dtype, wanted: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(_SEED)
        self._device, self._dtype, self._wanted = device, dtype, wanted

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator).mul_(scale)
        return values.to(self._device, self._dtype).to(self._wanted)


def _cases(shapes: TrialShapes, device: torch.device) -> Iterator[tuple[str, _Case]]:
    hidden, dtype = shapes.hidden, shapes.dtype

    def norm(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        numbers = _Numbers(device, dtype, wanted)
        return (module.rms_norm(numbers(5, hidden), numbers(hidden), 1e-6),)

    def gate(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        return (module.silu_mul(_Numbers(device, dtype, wanted)(5, 2 * hidden)),)

    yield "rms_norm", norm
    yield "silu_mul", gate
    # The layers take it for halves only.
    for rows in _ROWS if dtype is not torch.float32 else ():
        yield f"linear_small of {rows} rows", _product(hidden, rows, device, dtype)
    yield "kv_write", _written(shapes, device)
    for decode in (True, False):
        kind = "decode" if decode else "prefill"
        yield f"paged_attention ({kind})", _attention(shapes, device, decode=decode)
    yield "sample", _draws(shapes, device)


def _product(hidden: int, rows: int, device: torch.device, dtype: torch.dtype) -> _Case:
    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        numbers = _Numbers(device, dtype, wanted)
        x, weight = numbers(rows, hidden), numbers(hidden, hidden, scale=hidden**-0.5)
        return (
            module.linear_small(x, weight, norm=numbers(hidden), residual=numbers(rows, hidden)),
        )

    return case


def _written(shapes: TrialShapes, device: torch.device) -> _Case:
    """What is in the cache after keys and values were written to it, with their scales."""

    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        slots = torch.tensor([_BLOCK * 2 + 3, -1, 0, _BLOCK * 3 + 15], device=device)
        caches, scales = _cache(shapes, 4, wanted, device)
        numbers = _Numbers(device, shapes.dtype, wanted)
        k, v = (numbers(4, shapes.kv_heads, shapes.head_dim) for _ in range(2))
        module.kv_write(k, v, *caches, slots, **scales)
        # Eight bits may be rounded to either side: their values are compared, not their bytes.
        return tuple(
            cache.float() * (1.0 if factor is None else factor[..., None])
            for cache, factor in zip(caches, scales.values() or (None, None), strict=True)
        )

    return case


def _cache(
    shapes: TrialShapes, blocks: int, wanted: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Keys and values of zeros, and their scales where they have any."""
    small = shapes.kv_dtype.itemsize == 1
    dtype = shapes.kv_dtype if small else wanted
    size = (blocks, shapes.kv_heads, _BLOCK, shapes.head_dim)
    caches = [torch.zeros(size, device=device).to(dtype) for _ in range(2)]
    if not small:
        return caches, {}
    return caches, {name: torch.zeros(size[:3], device=device) for name in ("k_scales", "v_scales")}


def _attention(shapes: TrialShapes, device: torch.device, *, decode: bool) -> _Case:
    """Rows of many lengths over pages in no order. Every page that no row has is full of NaN."""
    queries = [1 if decode else min(length, 40) for length in _LENGTHS]
    used = [-(-length // _BLOCK) for length in _LENGTHS]

    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        numbers = _Numbers(device, shapes.dtype, wanted)
        order = torch.randperm(sum(used) + 4, generator=torch.Generator().manual_seed(_SEED))
        caches, scales = _cache(shapes, len(order), wanted, device)
        tables = torch.zeros(len(used), max(used), dtype=torch.int32)
        taken = iter(order.tolist())
        for row, count in enumerate(used):
            tables[row, :count] = torch.tensor([next(taken) for _ in range(count)])
        slots = (order[: sum(used), None] * _BLOCK + torch.arange(_BLOCK)).flatten().to(device)
        size = (len(slots), shapes.kv_heads, shapes.head_dim)
        k_cache, v_cache = caches
        # Both sides read what the reference has written.
        reference.kv_write(numbers(*size), numbers(*size), k_cache, v_cache, slots, **scales)
        for spare in order[sum(used) :].tolist():
            for tensor in scales.values() or caches:
                tensor[spare] = torch.nan
        starts = torch.tensor([0, *queries]).cumsum(0).int().to(device)
        lengths = torch.tensor(_LENGTHS).int().to(device)
        q = numbers(sum(queries), shapes.heads, shapes.head_dim)
        options: dict[str, Any] = {**scales, "decode_rows": len(queries) if decode else 0}
        scale = shapes.head_dim**-0.5
        tables = tables.to(device)
        found = module.paged_attention(
            q, k_cache, v_cache, tables, lengths, starts, scale, **options
        )
        return (found,)

    return case


def _draws(shapes: TrialShapes, device: torch.device) -> _Case:
    """Tokens, largest logits and logprobs, of greedy rows and of drawn ones."""

    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        rows = 6
        # In float32 on both sides, so that a draw is the same.
        logits = _Numbers(device, torch.float32, torch.float32)(rows, shapes.vocab, scale=4.0)
        keys = torch.arange(rows, device=device) * 7_919 + 1
        temperature = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.3, 1.0], device=device)
        top_k = torch.tensor([0, 0, 40, 5, 0, 2], dtype=torch.int32, device=device)
        top_p = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.8, 1.0], device=device)
        filters = {"top_k": top_k, "top_p": top_p, "min_p": torch.zeros(rows, device=device)}
        tokens, peak, logprobs = module.sample(
            logits, keys, torch.arange(rows, device=device), temperature, **filters
        )
        return tokens, peak, logprobs

    return case
