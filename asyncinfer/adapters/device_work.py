"""Work of an adapter pool on a GPU beside steps: copies, and compiling what steps need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Final

import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.dispatch import KernelError
from asyncinfer.kernels.streams import lend_streams, return_streams
from asyncinfer.layers import LoraLayers

__all__ = ["compile_kernels", "own_stream"]

#: Token counts of a step that differ in their kernels: few, and many.
_ROWS: Final = (1, 65)


def compile_kernels(layers: LoraLayers) -> None:
    """Run the kernels of these layers for tokens without an adapter. A kernel that cannot be
    compiled is left to the first step that needs it, which reports it as a fallback."""
    with suppress(KernelError):
        for weights, rows in product(layers.values(), _ROWS):
            down, up = weights.down, weights.up
            x, y = (down.new_zeros(rows, held.shape[2]) for held in (down, up))
            nobody = torch.full((rows,), -1, dtype=torch.int32, device=down.device)
            ops.lora_add(y, x, down, up, weights.ranks, nobody, sizes=weights.sizes)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Give this thread's GPU work within the block a stream of its own, on which nothing is
    recorded, and wait for it at the end."""
    if device.type != "cuda":
        yield
        return
    (stream,) = lend_streams(device, 1)
    try:
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
    finally:
        return_streams(device, (stream,))
