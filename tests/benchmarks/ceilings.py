"""What a device does at most: bytes of a large copy, operations of a large matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asyncinfer.bench.record import Figure

if TYPE_CHECKING:
    import torch

    from asyncinfer.kernels.device_clock import DeviceClock
    from asyncinfer.planner import Speed

__all__ = ["Ceilings", "bench_device", "bench_dtype", "is_h200", "measure_ceilings"]


#: A device's copy, as a power of two bytes, and the rows of its square product.
_SIZES: Final = {"cuda": (31, 8192), "cpu": (28, 2048)}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured in this run, or given; per second."""

    bandwidth: float
    flops: float

    @property
    def speed(self) -> Speed:
        from asyncinfer.planner import Speed

        return Speed(bandwidth=self.bandwidth, flops=self.flops)

    def figures(self) -> tuple[Figure, ...]:
        return (
            Figure("copy bandwidth", self.bandwidth / 1e12, "TB/s", "higher"),
            Figure("matrix product", self.flops / 1e12, "TFLOP/s", "higher"),
        )


def bench_device(name: str = "auto") -> torch.device:
    """The device of this name; "auto" takes CUDA where there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def bench_dtype(device: torch.device) -> torch.dtype:
    """What models are computed in there."""
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def is_h200(device: torch.device) -> bool:
    """Targets are those of an H200."""
    import torch

    return device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)


def measure_ceilings(device: torch.device, *, quick: bool = False) -> Ceilings:
    """A copy that reads and writes far more than caches hold, and a square product in the model's
    dtype of normal numbers: of zeros a GPU is faster. `quick` is small, and means nothing."""

    from asyncinfer.kernels.device_clock import DeviceClock

    clock = DeviceClock(device)
    # A copy that a CPU's caches hold is several times as fast as any step can be.
    sizes = (24, 256) if quick else _SIZES[device.type]
    return Ceilings(
        bandwidth=_copied(clock, device, 1 << sizes[0]),
        flops=_multiplied(clock, device, sizes[1]),
    )


def _copied(clock: DeviceClock, device: torch.device, size: int) -> float:
    import torch

    source = torch.full((size,), 7, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / clock.seconds(lambda: target.copy_(source))


def _multiplied(clock: DeviceClock, device: torch.device, size: int) -> float:
    import torch

    dtype = bench_dtype(device)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) * 0.02 for _ in range(2))
    return 2 * size**3 / clock.seconds(lambda: a @ b)
