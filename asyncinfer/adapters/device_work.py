"""What a pool of adapters does on a GPU beside steps: copies, and what steps need compiled."""

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

#: Tokens of a step, for each of whose sizes there are kernels of their own: few, and many.
_ROWS: Final = (1, 65)


def compile_kernels(layers: LoraLayers) -> None:
    """Run the kernels of these layers for tokens that have no adapter. What cannot be compiled is
    left to the first step that wants it, which does without and says so."""
    with suppress(KernelError):
        for weights, rows in product(layers.values(), _ROWS):
            down, up = weights.down, weights.up
            x, y = (down.new_zeros(rows, held.shape[2]) for held in (down, up))
            nobody = torch.full((rows,), -1, dtype=torch.int32, device=down.device)
            ops.lora_add(y, x, down, up, weights.ranks, nobody, sizes=weights.sizes)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Give this thread's work on a GPU a stream of its own within the block, which nobody records
    on, and wait for it at the end."""
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
