"""Kernels at the shapes of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncinfer.testing.kernel_case import KernelCase

if TYPE_CHECKING:
    import torch

    from asyncinfer.models import ModelConfig

__all__ = ["kernel_cases"]


def kernel_cases(
    config: ModelConfig,
    *,
    batch: int,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> Iterator[KernelCase]:
    """The kernels of one decode step, made one after the other: normal inputs, weights of std
    0.02, `batch` rows that have `context` tokens each, in pages that lie apart."""
    # Imports torch: fakes need none.
    from asyncinfer.testing.decode_kernels import decode_kernels

    return decode_kernels(
        config, batch=batch, context=context, device=device, dtype=dtype, seed=seed
    )
