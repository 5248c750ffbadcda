from asyncinfer.kernels import ops

__all__ = ["ops"]
