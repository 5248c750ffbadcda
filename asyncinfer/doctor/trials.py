"""Trials: whether what the engine would compute with gives right numbers on this machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from asyncinfer.kernels import native, onednn
from asyncinfer.machine import cpuinfo
from asyncinfer.quantization import PackedRows, QuantisedWeight, make_linear

__all__ = ["Trial", "trials"]

#: Largest error of a product beside float64, as a share of its largest number.
_FLOAT32_ERROR, _BFLOAT16_ERROR = 1e-5, 2e-2
_ROWS, _OUTPUTS, _INPUTS = (1, 4, 17), 96, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way to compute, tried."""

    name: str
    #: "right"; "wrong" or "missing", and the engine takes `instead`; "unsupported": the processor
    #: has no instructions for it.
    verdict: str
    #: The largest error as a share of the largest number, and how much is allowed; None: not tried.
    error: float | None = None
    allowed: float | None = None
    #: Seconds of one call of a GPU's kernel, and the seconds that the device takes to copy as many
    #: bytes as the call's tensors have; None: not timed.
    seconds: float | None = None
    floor: float | None = None
    #: What the engine does without it, and what would bring it back.
    instead: str = ""

    @property
    def fell_back(self) -> bool:
        """Whether the engine does without something that this machine should have."""
        return self.verdict in ("wrong", "missing")


def trials() -> Iterator[Trial]:
    """Each way in turn."""
    for bits in (4, 8):
        yield _packed(bits)
    for dtype, allowed in ((torch.float32, _FLOAT32_ERROR), (torch.bfloat16, _BFLOAT16_ERROR)):
        yield _floats(dtype, allowed)


def _packed(bits: int) -> Trial:
    name = f"products of {bits}-bit weights, compiled for the processor"
    instead = "torch's operators, which unpack weights in every step"
    if not _compiles():
        return Trial(name=name, verdict="unsupported", instead=instead)
    generator = torch.Generator().manual_seed(bits)
    high = 1 << bits
    numbers = torch.randint(0, high, (_OUTPUTS, _INPUTS), generator=generator)
    scales = torch.rand(_OUTPUTS, _INPUTS // 32, generator=generator) * 0.01 + 0.001
    rows = PackedRows(_weight(numbers, scales, bits))
    if not rows.has_kernel:
        why = "" if native.available() else "; `pip install llvmlite` where it is missing"
        return Trial(name=name, verdict="missing", instead=instead + why)
    weight = rows[:].double()
    errors = [
        _error(rows.product(x), x.double() @ weight.T)
        for x in (torch.randn(count, _INPUTS, generator=generator) for count in _ROWS)
    ]
    return _judged(name, errors, _FLOAT32_ERROR, instead)


def _compiles() -> bool:
    """Whether there are kernels for this processor, as far as the system describes it."""
    machine, flags = platform.machine().lower(), cpuinfo().get("flags")
    if machine in ("x86_64", "amd64"):
        return flags is None or set(native.NEEDED) <= set(flags.split())
    return machine in ("aarch64", "arm64")


def _weight(numbers: torch.Tensor, scales: torch.Tensor, bits: int) -> QuantisedWeight:
    if bits == 8:
        return QuantisedWeight((numbers - 128).to(torch.int8), scales, None, torch.float32)
    low, high = numbers[:, 0::2], numbers[:, 1::2]
    packed = (low | high << 4).to(torch.uint8)
    return QuantisedWeight(packed, scales, None, torch.float32)


def _floats(dtype: torch.dtype, allowed: float) -> Trial:
    short = str(dtype).removeprefix("torch.")
    name, instead = f"oneDNN's products in {short}", "torch's own products"
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(_OUTPUTS, _INPUTS, generator=generator).to(dtype)
    if onednn.native_is_faster(weight):
        name = f"products in {short}, compiled for the processor"
        product: Callable[[torch.Tensor], torch.Tensor] = make_linear(weight)
    elif onednn.available(dtype):
        product = partial(onednn.linear, weight=onednn.reorder(weight))
    else:
        return Trial(name=name, verdict="unsupported", instead=instead)
    errors = [
        _error(product(x), x.double() @ weight.double().T)
        for x in (torch.randn(count, _INPUTS, generator=generator).to(dtype) for count in _ROWS)
    ]
    return _judged(name, errors, allowed, instead)


def _error(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (got.double() - right).abs().max() / right.abs().max()


def _judged(name: str, errors: list[torch.Tensor], allowed: float, instead: str) -> Trial:
    # An error that is no number is wrong, too; Python's `max` passes over it.
    error = float(torch.stack(errors).max())
    verdict = "right" if error <= allowed else "wrong"
    return Trial(
        name=name,
        verdict=verdict,
        error=error,
        allowed=allowed,
        instead="" if verdict == "right" else instead,
    )
