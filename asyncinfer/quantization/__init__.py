from asyncinfer.quantization.blocks import BlockWeight, block_layout
from asyncinfer.quantization.dense import CudaLinear, has_fused_kernels
from asyncinfer.quantization.grouped import GroupedLinear, SeparateLinears, make_grouped_linear
from asyncinfer.quantization.laid import BlockEnds, LaidWeight
from asyncinfer.quantization.linear import (
    STORAGE_LAYOUTS,
    HeldWeight,
    Linear,
    hold,
    make_linear,
)
from asyncinfer.quantization.native_weight import NativeWeight
from asyncinfer.quantization.packed import PackedRows, held_for_rows
from asyncinfer.quantization.packed_weight import PackedWeight, as_tensor
from asyncinfer.quantization.reordered import ReorderedWeight
from asyncinfer.quantization.stacked import StackedWeight, stacked
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = [
    "STORAGE_LAYOUTS",
    "BlockEnds",
    "BlockWeight",
    "CudaLinear",
    "GroupedLinear",
    "HeldWeight",
    "LaidWeight",
    "Linear",
    "NativeWeight",
    "PackedRows",
    "PackedWeight",
    "QuantisedWeight",
    "ReorderedWeight",
    "SeparateLinears",
    "StackedWeight",
    "as_tensor",
    "block_layout",
    "has_fused_kernels",
    "held_for_rows",
    "hold",
    "make_grouped_linear",
    "make_linear",
    "stacked",
]
