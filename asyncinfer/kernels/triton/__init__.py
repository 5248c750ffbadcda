"""The kernels in Triton. The operators of `kernels.ops` run those in `__all__` for CUDA tensors."""

from asyncinfer.kernels.triton.decode_inputs import decode_inputs
from asyncinfer.kernels.triton.gate import gelu_mul, silu_mul
from asyncinfer.kernels.triton.grouped_linear import grouped_linear
from asyncinfer.kernels.triton.keep_draws import keep_draws
from asyncinfer.kernels.triton.kv_write import kv_write
from asyncinfer.kernels.triton.linear_small import linear_small
from asyncinfer.kernels.triton.lora_add import lora_add
from asyncinfer.kernels.triton.paged_attention import paged_attention
from asyncinfer.kernels.triton.rms_norm import add_rms_norm, rms_norm
from asyncinfer.kernels.triton.rope import rope
from asyncinfer.kernels.triton.rope_kv_write import rope_kv_write
from asyncinfer.kernels.triton.sample import sample

__all__ = [
    "add_rms_norm",
    "decode_inputs",
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
]
