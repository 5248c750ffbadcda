"""The kernels in torch: plain and obviously right, with the names and signatures of the Triton
kernels, which tests compare with them."""

from asyncinfer.kernels.reference.causal_conv import causal_conv
from asyncinfer.kernels.reference.decode_inputs import decode_inputs
from asyncinfer.kernels.reference.gated_delta_rule import gated_delta_rule
from asyncinfer.kernels.reference.grouped_linear import grouped_linear
from asyncinfer.kernels.reference.keep_draws import keep_draws
from asyncinfer.kernels.reference.kv_write import kv_write
from asyncinfer.kernels.reference.linear_small import linear_small
from asyncinfer.kernels.reference.lora_add import lora_add
from asyncinfer.kernels.reference.norms import add_rms_norm, gelu_mul, rms_norm, rope, silu_mul
from asyncinfer.kernels.reference.paged_attention import paged_attention
from asyncinfer.kernels.reference.rope_kv_write import rope_kv_write
from asyncinfer.kernels.reference.sample import sample
from asyncinfer.kernels.reference.state_space_dual import state_space_dual

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
