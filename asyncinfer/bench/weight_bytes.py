"""`weight_bytes`: what a model's weights take in memory, however they are held."""

from __future__ import annotations

import gc

import torch

from asyncinfer.models import Decoder

__all__ = ["weight_bytes"]


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of all tensors that the decoder's layers hold, each of them once. Tables of rotations
    are among them, which are as long as the decoder's context."""
    sizes: dict[object, int] = {}
    seen: set[int] = set()
    rest: list[object] = [decoder]
    while rest:
        one = rest.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            # A tensor in oneDNN's layout has no address, but is held only once.
            plain = one.layout is torch.strided
            key = (one.device, one.data_ptr(), one.shape) if plain else id(one)
            sizes[key] = one.numel() * one.element_size()
        elif isinstance(one, (list, tuple, dict)) or type(one).__module__.startswith("asyncinfer."):
            rest += [part for part in gc.get_referents(one) if not isinstance(part, type)]
    return sum(sizes.values())
