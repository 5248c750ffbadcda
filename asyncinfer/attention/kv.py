"""`KVCache`: the paged keys and values of every layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from asyncinfer.attention.contiguous import ContiguousKVPool
from asyncinfer.attention.formats import PLAIN, KVFormat, vector_bytes
from asyncinfer.kernels.flashinfer import FlashInfer

__all__ = ["KVCache", "KVShape", "LayerKV"]

#: What contiguous copies may take of a CPU's memory, as a share of what the pages take.
_CONTIGUOUS_SHARE = 1 / 4
#: Bytes: where torch begins its own tensors on a CPU.
_ALIGNMENT: Final = 64


class KVShape(Protocol):
    """The facts of a model that decide the size of its KV cache; `ModelConfig` has them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_parts(self) -> int:
        """2: keys and values; 1: the values are the keys themselves."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The `KVShape` of a single layer."""

    num_kv_heads: int
    head_dim: int
    kv_parts: int
    num_layers: int = 1


class KVCache:
    """The pages of one KV group, or of those of its layers whose keys and values are alike. Keys
    and values by layer, `k[layer]` and `v[layer]` each `[num_blocks, kv_heads, block_size,
    head_dim]`: views into one allocation, so that a page is copied in one call.

    The `format` decides in which tensors they are stored. Where each vector has one scale,
    `k_scales[layer]` and `v_scales[layer]` are float32 `[num_blocks, kv_heads, block_size]`."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layers: Sequence[int] | None = None,
        *,
        format: KVFormat = PLAIN,
        dtype: torch.dtype | None = None,
        head_dim: int | None = None,
    ) -> None:
        """`tensors` are the format's, each `[layers, parts, num_blocks, kv_heads, block_size,
        width]`; keys before values, or one part that is both. `layers` are the model's layers that
        they are for, in order; None: all. `dtype` is what is written and read, in vectors of
        `head_dim`; None: the numbers' own."""
        #: The numbers, in the kernels' layout.
        self.storage = tensors[0]
        self.format = format
        self.dtype = dtype or self.storage.dtype
        #: Attends over these pages if the host knows a pass' lengths; None: our own kernels do.
        self.flashinfer: FlashInfer | None = None
        #: Every tensor of the format, in dtypes that torch can index.
        self.tensors = [_indexable(tensor) for tensor in tensors]
        shape = self.storage.shape
        self.num_layers, parts, self.num_blocks, kv_heads, self.block_size, width = shape
        #: Numbers of a vector.
        self.head_dim = head_dim or width
        held_bytes = sum(t.nbytes for t in tensors) if self.storage.device.type == "cpu" else 0
        #: Copies of rows that attention keeps between passes. A GPU has none, since its kernels
        #: read pages, which take all remaining memory.
        self.contiguous = ContiguousKVPool(
            int(_CONTIGUOUS_SHARE * held_bytes) // self.dtype.itemsize,
            self.num_layers * parts * kv_heads * self.head_dim,
            self.dtype,
        )
        held = range(len(self.storage)) if layers is None else layers
        self.layers = frozenset(held)
        # By the model's layer. Layers of other groups share the entry of this group's first layer,
        # so that lists can be indexed by any layer up to the last one here.
        place = {layer: index for index, layer in enumerate(held)}
        places = [place.get(layer, 0) for layer in range(max(place, default=-1) + 1)]
        #: By layer and tensor: `[parts * num_blocks * kv_heads, block_size, width]`.
        self.pages = [[tensor[at].flatten(0, 2) for tensor in self.tensors] for at in places]
        self._by_part = [
            list(zip(*(tensor[at] for tensor in self.tensors), strict=True)) for at in places
        ]
        self.k = [self.storage[at, 0] for at in places]
        self.v = [self.storage[at, -1] for at in places]
        whole = len(tensors) > 1 and width == self.head_dim
        scales = self.tensors[1][..., 0] if whole else None
        self.k_scales = [None if scales is None else scales[at, 0] for at in places]
        self.v_scales = [None if scales is None else scales[at, -1] for at in places]

    @classmethod
    def allocate(
        cls,
        model_config: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        format: KVFormat = PLAIN,
        layers: Sequence[int] | None = None,
    ) -> KVCache:
        """A cache of `num_blocks` blocks for a model of `dtype`, zeroed: the host's system then
        commits memory at its first use. `layers` are the model's layers; None: all."""
        if layers is None:
            layers = range(model_config.num_layers)
        shape = len(layers), model_config.kv_parts, num_blocks, model_config.num_kv_heads
        tensors = [
            _zeros((*shape, block_size, width), kind, torch.device(device))
            for width, kind in format.tensors(model_config.head_dim, dtype)
        ]
        head_dim = model_config.head_dim
        return cls(tensors, layers, format=format, dtype=dtype, head_dim=head_dim)

    @staticmethod
    def bytes_per_block(
        model_config: KVShape, block_size: int, dtype: torch.dtype, format: KVFormat = PLAIN
    ) -> int:
        """Bytes that one block takes over all layers, keys and values."""
        vectors = model_config.kv_parts * model_config.num_layers * model_config.num_kv_heads
        return vectors * block_size * vector_bytes(format, model_config.head_dim, dtype)

    def encoded(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where `k` and `v` `[tokens, kv_heads, head_dim]` go, and what goes there: of each tensor
        of each part of a layer its pages `[num_blocks, kv_heads, block_size, width]` and the tokens
        as it holds them, `[tokens, kv_heads, width]`."""
        # A cache whose values are its keys has one part.
        for pages, new in zip(self._by_part[layer], (k, v), strict=False):
            yield from zip(pages, self.format.encode(new), strict=True)

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero these blocks, int64 `[n]`, in every layer."""
        for tensor in self.tensors:
            tensor.index_fill_(2, blocks, 0)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, `(source, target)` each, in every layer.

        All sources are read before any target is written: `[(0, 1), (1, 2)]` gives block 2 what
        block 1 held before.
        """
        if not pairs or not self.num_layers:
            return
        index = torch.tensor(pairs, dtype=torch.int64).to(self.storage.device, non_blocking=True)
        source, target = index.unbind(1)
        for tensor in self.tensors:
            tensor.index_copy_(2, target, tensor.index_select(2, source))


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with float8 as int8."""
    short = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return tensor.view(torch.int8) if short else tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, of which the host's system commits those pages that are used. `torch.zeros` would
    write them all, which takes a quarter of a second for each GiB."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(shape)
