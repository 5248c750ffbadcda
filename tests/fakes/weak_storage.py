"""A tensor's memory, known but not kept."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Place", "WeakStorage", "in_memory", "key_of", "tensors_of"]


def in_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor in memory that others may see: not one in a library's own layout."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def tensors_of(value: object) -> list[torch.Tensor]:
    """Those in memory among an operator's arguments or results."""
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in tensors_of(each)]
    return [value] if in_memory(value) else []


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


class Place:
    """Where a tensor is."""

    __slots__ = ("_dtype", "_offset", "_size", "_stride", "ref")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.ref = WeakStorage(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = int(tensor.storage_offset())

    def tensor(self) -> torch.Tensor:
        """The tensor again, whose memory must not be freed."""
        empty = torch.empty(0, dtype=self._dtype)
        return empty.set_(self.ref.storage(), self._offset, self._size, self._stride)
