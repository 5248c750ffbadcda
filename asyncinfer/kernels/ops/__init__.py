"""The kernels as callers use them: checked, and run by Triton on a GPU that has it.

Each has the signature and the docstring of its torch implementation in `kernels/reference`, and
raises `ValueError` for shapes and dtypes that do not fit.
"""

from asyncinfer.kernels.ops.decode import decode_inputs, keep_draws, sample
from asyncinfer.kernels.ops.lora import lora_add
from asyncinfer.kernels.ops.norms import add_rms_norm, gelu_mul, rms_norm, rope, silu_mul
from asyncinfer.kernels.ops.paged import kv_write, paged_attention, rope_kv_write
from asyncinfer.kernels.ops.products import grouped_linear, linear_small
from asyncinfer.kernels.ops.states import causal_conv, gated_delta_rule, state_space_dual

__all__ = [
    "add_rms_norm",
    "causal_conv",
    "decode_inputs",
    "gated_delta_rule",
    "gelu_mul",
    "grouped_linear",
    "keep_draws",
    "kv_write",
    "linear_small",
    "lora_add",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_kv_write",
    "sample",
    "silu_mul",
    "state_space_dual",
]
