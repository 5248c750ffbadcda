from asyncinfer.quantization.grouped import GroupedLinear, make_grouped_linear
from asyncinfer.quantization.linear import Linear, LinearFormat, make_linear

__all__ = ["GroupedLinear", "Linear", "LinearFormat", "make_grouped_linear", "make_linear"]
