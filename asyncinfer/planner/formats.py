"""The formats that weights and KV can be stored in, and what each asks of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from asyncinfer.attention import kv_format, vector_bytes
from asyncinfer.planner.floors import Speed, Storage
from asyncinfer.planner.gpus import Gpu

__all__ = ["DTYPE_BYTES", "FORMATS", "Format"]

DTYPE_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How weights and KV are stored."""

    name: str
    #: Bytes per number of the layers' matrices, their scales included; None: they stay as they are.
    linear: float | None = None
    #: The same of embedding, head and norms.
    others: float | None = None
    #: What the engine calls the format of keys and values.
    kv: str = "plain"
    #: Whether the matrix units take the layers' products in fp8, where they can.
    fp8_arithmetic: bool = False

    def storage(self, dtype: str, head_dim: int) -> Storage:
        """Bytes per number of a model in `dtype`; `head_dim` is that of the KV cache."""
        size = DTYPE_BYTES[dtype]
        linear = size if self.linear is None else self.linear
        vector = vector_bytes(kv_format(self.kv), head_dim, getattr(torch, dtype))
        others = size if self.others is None else self.others
        return Storage(weights=others, linear=linear, kv=vector / head_dim)

    def speed(self, gpu: Gpu, dtype: str, *, nominal: bool) -> Speed:
        """What a GPU reaches with a model in `dtype`: measured figures if it has any, unless
        `nominal` asks for the maker's."""
        reached = 1.0
        if gpu.measured_bf16 is not None and not nominal:
            reached = gpu.measured_bf16 / gpu.bf16
        bandwidth = None if nominal else gpu.measured_bandwidth
        return Speed(
            bandwidth=bandwidth or gpu.bandwidth,
            flops=gpu.fp32 if dtype == "float32" else gpu.bf16 * reached,
            # fp8 was not measured: assume the share of the nominal figure that bf16 reaches.
            linear_flops=gpu.fp8 * reached if self.fp8_arithmetic and gpu.fp8 else None,
        )


#: Those of a GPU, whose kernels read no KV in 4 bits. int8 and fp8 have a scale per row, too few to
#: count; int4 a float16 scale and offset for 32 numbers or for 128.
FORMATS: Final = (
    Format(name="fp8 weights", linear=1.0, fp8_arithmetic=True),
    Format(name="int8 weights", linear=1.0),
    Format(name="int4 weights", linear=0.5 + 4 / 32),
    Format(name="int4-128 weights", linear=0.5 + 4 / 128),
    Format(name="fp8 KV", kv="fp8"),
    Format(name="int8 KV", kv="int8"),
    Format(name="int8 weights and KV", linear=1.0, kv="int8"),
    Format(name="fp8 weights and KV", linear=1.0, kv="fp8", fp8_arithmetic=True),
)
