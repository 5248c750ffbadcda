"""The Triton twins. `ops` takes what is named in `__all__` for CUDA tensors."""

from asyncinfer.kernels.triton.add_rms_norm import add_rms_norm
from asyncinfer.kernels.triton.rms_norm import rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
