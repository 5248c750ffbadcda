from asyncinfer.quantization.linear import Linear, LinearFormat, make_linear

__all__ = ["Linear", "LinearFormat", "make_linear"]
