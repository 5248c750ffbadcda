"""The kernels in torch: plain and obviously right, with the names and signatures of the Triton
kernels, which tests compare with them."""

from asyncinfer.kernels.reference.add_rms_norm import add_rms_norm
from asyncinfer.kernels.reference.decode_inputs import decode_inputs
from asyncinfer.kernels.reference.gelu_mul import gelu_mul
from asyncinfer.kernels.reference.grouped_linear import grouped_linear
from asyncinfer.kernels.reference.keep_draws import keep_draws
from asyncinfer.kernels.reference.kv_write import kv_write
from asyncinfer.kernels.reference.linear_small import linear_small
from asyncinfer.kernels.reference.paged_attention import paged_attention
from asyncinfer.kernels.reference.rms_norm import rms_norm
from asyncinfer.kernels.reference.rope import rope
from asyncinfer.kernels.reference.rope_kv_write import rope_kv_write
from asyncinfer.kernels.reference.sample import sample
from asyncinfer.kernels.reference.silu_mul import silu_mul

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
