"""The Triton twins. `ops` takes what is named in `__all__` for CUDA tensors."""

from asyncinfer.kernels.triton.add_rms_norm import add_rms_norm
from asyncinfer.kernels.triton.gelu_mul import gelu_mul
from asyncinfer.kernels.triton.rms_norm import rms_norm
from asyncinfer.kernels.triton.silu_mul import silu_mul

__all__ = ["add_rms_norm", "gelu_mul", "rms_norm", "silu_mul"]
