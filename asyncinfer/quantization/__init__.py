from asyncinfer.quantization.dense import CudaLinear, has_fused_kernels
from asyncinfer.quantization.grouped import GroupedLinear, make_grouped_linear
from asyncinfer.quantization.linear import Linear, LinearFormat, make_linear

__all__ = [
    "CudaLinear",
    "GroupedLinear",
    "Linear",
    "LinearFormat",
    "has_fused_kernels",
    "make_grouped_linear",
    "make_linear",
]
