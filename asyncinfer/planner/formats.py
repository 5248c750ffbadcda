"""The formats that weights and KV can be stored in, and what each asks of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncinfer.planner.floors import Speed, Storage
from asyncinfer.planner.gpus import Gpu

__all__ = ["DTYPE_BYTES", "FORMATS", "Format"]

DTYPE_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What is stored in fewer bytes than the model's dtype has. Embedding, head and norms never
    are. A part of None stays as it is."""

    name: str
    #: Bytes per number of the layers' matrices, their scales included.
    linear: float | None = None
    #: Bytes per number of keys and values, their scales included.
    kv: float | None = None
    #: Whether the matrix units take the layers' products in fp8, where they can.
    fp8_arithmetic: bool = False

    def storage(self, dtype: str) -> Storage:
        """With the rest in `dtype`."""
        size = DTYPE_BYTES[dtype]
        linear = size if self.linear is None else self.linear
        return Storage(weights=size, linear=linear, kv=size if self.kv is None else self.kv)

    def speed(self, gpu: Gpu, dtype: str, *, nominal: bool) -> Speed:
        """Of a GPU that computes the rest in `dtype`; measured figures where there are any and
        `nominal` does not ask for the others."""
        reached = 1.0
        if gpu.measured_bf16 is not None and not nominal:
            reached = gpu.measured_bf16 / gpu.bf16
        bandwidth = None if nominal else gpu.measured_bandwidth
        return Speed(
            bandwidth=bandwidth or gpu.bandwidth,
            flops=gpu.fp32 if dtype == "float32" else gpu.bf16 * reached,
            # What fp8 reaches was not measured: the same share of what is promised.
            linear_flops=gpu.fp8 * reached if self.fp8_arithmetic and gpu.fp8 else None,
        )


#: int8 has a scale per row, too few to count; int4 a scale and a zero for 128 numbers.
FORMATS: Final = (
    Format(name="fp8 weights", linear=1.0, fp8_arithmetic=True),
    Format(name="int8 weights", linear=1.0),
    Format(name="int4 weights", linear=0.5 + 2.5 / 128),
    Format(name="fp8 KV", kv=1.0),
    Format(name="fp8 weights and KV", linear=1.0, kv=1.0, fp8_arithmetic=True),
)
