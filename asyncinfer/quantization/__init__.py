from asyncinfer.quantization.dense import CudaLinear, has_fused_kernels
from asyncinfer.quantization.grouped import GroupedLinear, make_grouped_linear
from asyncinfer.quantization.linear import Linear, make_linear
from asyncinfer.quantization.packed import PackedRows, held_for_rows
from asyncinfer.quantization.weight import QuantisedWeight, as_tensor

__all__ = [
    "CudaLinear",
    "GroupedLinear",
    "Linear",
    "PackedRows",
    "QuantisedWeight",
    "as_tensor",
    "has_fused_kernels",
    "held_for_rows",
    "make_grouped_linear",
    "make_linear",
]
