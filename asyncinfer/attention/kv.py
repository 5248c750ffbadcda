"""`KVCache`: the paged keys and values of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["KVCache", "KVShape"]


class KVShape(Protocol):
    """What of a model decides the size of its KV cache (`ModelConfig` has it)."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_parts(self) -> int:
        """2: keys and values; 1: the values are the keys themselves."""


class KVCache:
    """Keys and values by layer, `k[layer]` and `v[layer]` each `[num_blocks, kv_heads,
    block_size, head_dim]`: views into one allocation, so that a block is copied in one call.

    Layers that see a window only may have a cache of their own, `window`, whose blocks are other
    pages and may be fewer."""

    def __init__(
        self,
        storage: torch.Tensor,
        layers: Sequence[int] | None = None,
        window: KVCache | None = None,
    ) -> None:
        """`layers` are the model's layers that `storage` is for, in order; None: all."""
        #: `[layers, parts, num_blocks, kv_heads, block_size, head_dim]`; keys before values, or one
        #: part that is both.
        self.storage = storage
        self.window = window
        self.layers = frozenset(range(len(storage)) if layers is None else layers)
        place = dict(zip(range(len(storage)) if layers is None else layers, storage, strict=True))
        #: By the model's layer. The first that is here stands for those that are not, so that any
        #: may be asked for a shape.
        self.by_layer: list[torch.Tensor] = [
            place.get(layer, storage[0]) for layer in range(max(place, default=-1) + 1)
        ]
        self.k: list[torch.Tensor] = [layer[0] for layer in self.by_layer]
        self.v: list[torch.Tensor] = [layer[-1] for layer in self.by_layer]

    @classmethod
    def allocate(
        cls,
        model_config: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        window_layers: Sequence[int] = (),
        window_pages: int = 0,
    ) -> KVCache:
        """A cache of `num_blocks` blocks, zeroed (a host then commits pages as they are used), with
        one of `window_pages` for `window_layers`."""

        def zeros(layers: Sequence[int], blocks: int) -> torch.Tensor:
            shape = (
                len(layers),
                model_config.kv_parts,
                blocks,
                model_config.num_kv_heads,
                block_size,
                model_config.head_dim,
            )
            return torch.zeros(shape, dtype=dtype, device=device)

        near = [layer for layer in range(model_config.num_layers) if layer in window_layers]
        far = [layer for layer in range(model_config.num_layers) if layer not in window_layers]
        window = cls(zeros(near, window_pages), near) if near else None
        return cls(zeros(far, num_blocks), far, window)

    @staticmethod
    def bytes_per_block(model_config: KVShape, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, keys and values."""
        per_token = model_config.num_kv_heads * model_config.head_dim * dtype.itemsize
        return model_config.kv_parts * model_config.num_layers * block_size * per_token

    @property
    def num_layers(self) -> int:
        return self.storage.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[2]

    @property
    def block_size(self) -> int:
        return self.storage.shape[4]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, `(source, target)` each, in every layer.

        All sources are read before any target is written: `[(0, 1), (1, 2)]` gives block 2 what
        block 1 held before.
        """
        if not pairs or not self.num_layers:
            return
        index = torch.tensor(pairs, dtype=torch.int64).to(self.storage.device, non_blocking=True)
        source, target = index.unbind(1)
        self.storage.index_copy_(2, target, self.storage.index_select(2, source))
