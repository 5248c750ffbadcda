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
    block_size, head_dim]`: views into one allocation, so that a block is copied in one call."""

    def __init__(self, storage: torch.Tensor) -> None:
        #: `[layers, parts, num_blocks, kv_heads, block_size, head_dim]`; keys before values, or one
        #: part that is both.
        self.storage = storage
        self.k: list[torch.Tensor] = [layer[0] for layer in storage]
        self.v: list[torch.Tensor] = [layer[-1] for layer in storage]

    @classmethod
    def allocate(
        cls,
        model_config: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCache:
        """A cache of `num_blocks` blocks, zeroed (a host then commits pages as they are used)."""
        shape = (
            model_config.num_layers,
            model_config.kv_parts,
            num_blocks,
            model_config.num_kv_heads,
            block_size,
            model_config.head_dim,
        )
        return cls(torch.zeros(shape, dtype=dtype, device=device))

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
        if not pairs:
            return
        index = torch.tensor(pairs, dtype=torch.int64).to(self.storage.device, non_blocking=True)
        source, target = index.unbind(1)
        self.storage.index_copy_(2, target, self.storage.index_select(2, source))
