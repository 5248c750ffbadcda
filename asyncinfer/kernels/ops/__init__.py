"""The kernels' one door: checks shapes and dtypes, then picks the twin for the tensor's device.

`reference=True` takes the torch twin wherever the tensors are; else CUDA tensors go to the Triton
twin if there is one.
"""

from asyncinfer.kernels.ops.decode import decode_inputs, keep_draws, sample
from asyncinfer.kernels.ops.norms import add_rms_norm, gelu_mul, rms_norm, rope, silu_mul
from asyncinfer.kernels.ops.paged import kv_write, paged_attention, rope_kv_write
from asyncinfer.kernels.ops.products import grouped_linear, linear_small

__all__ = [
    "add_rms_norm",
    "decode_inputs",
    "gelu_mul",
    "grouped_linear",
    "keep_draws",
    "kv_write",
    "linear_small",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_kv_write",
    "sample",
    "silu_mul",
]
