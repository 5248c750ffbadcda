"""The Triton twins. `ops` takes what is named in `__all__` for CUDA tensors."""

__all__: list[str] = []
