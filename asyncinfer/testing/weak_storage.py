"""`WeakStorage`: a tensor's memory, known but not kept."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["WeakStorage", "in_memory", "key_of"]


def in_memory(value: object) -> bool:
    """Whether it is a tensor in memory that others may see: not one in a library's own layout."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def key_of(tensor: torch.Tensor) -> int:
    """The same for all tensors in one memory; another's only after it was freed."""
    key: int = tensor.untyped_storage()._cdata
    return key


class WeakStorage:
    """While it is there, the memory's key is no other's."""

    __slots__ = ("_ref",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._ref: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def freed(self) -> bool:
        return bool(self._ref.expired())

    def storage(self) -> torch.UntypedStorage:
        """The memory, which must not be freed."""
        storage: torch.UntypedStorage = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        return storage
