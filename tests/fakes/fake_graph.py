"""A recording of torch operators that is replayed as a CUDA graph is: the same operators on the
same memory, and no line of Python between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fakes.weak_storage import Place, WeakStorage, in_memory, key_of, tensors_of
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = ["Recording", "ReplayError", "poison"]


class ReplayError(AssertionError):
    """A replay that would have read or written memory that is somebody else's by then."""


@dataclass(slots=True)
class _Entry:
    operator: Callable[..., Any]
    args: Any
    kwargs: Any
    #: Its new tensors, in the recording's own memory, by their place in what it gives.
    results: dict[int, torch.Tensor]


@dataclass(slots=True)
class Recording:
    """What was done, in order."""

    entries: list[_Entry] = field(default_factory=list)
    #: Storages outside that it reads and writes, by key.
    reads: dict[int, WeakStorage] = field(default_factory=dict)
    writes: dict[int, WeakStorage] = field(default_factory=dict)
    #: What it writes outside, as it was before: recording does nothing.
    _before: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _own: set[int] = field(default_factory=set)

    def do(self, operator: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Record an operator, which changes `written` of its arguments."""
        given = tensors_of((*args, *kwargs.values()))
        for tensor in written:
            self._save(tensor)
        out = operator(*args, **kwargs)
        keys = {key_of(tensor) for tensor in given}
        fresh = {
            index: leaf
            for index, leaf in enumerate(tree_flatten(out)[0])
            if in_memory(leaf) and key_of(leaf) not in keys
        }
        self._own |= {key_of(tensor) for tensor in fresh.values()}
        if not fresh and not written:
            return out  # A view: whoever uses it knows the place.
        for tensor in given:
            self._meet(tensor, any(tensor is other for other in written))
        args, kwargs = tree_map_only(torch.Tensor, self._placed, (args, kwargs))
        self.entries.append(_Entry(operator, args, kwargs, fresh))
        return out

    def undo(self) -> None:
        """Put back what recording has changed, and let nobody use what it has made."""
        for now, before in self._before.values():
            now.copy_(before)
        self._before.clear()
        self.spoil()

    def replay(self) -> None:
        for entry in self.entries:
            kwargs = {name: found(value) for name, value in entry.kwargs.items()}
            out = tree_flatten(entry.operator(*found(entry.args), **kwargs))[0]
            for index, result in entry.results.items():
                result.copy_(out[index])
        self.spoil()

    def spoil(self) -> None:
        """The memory of the recording may be another graph's now."""
        for entry in self.entries:
            for result in entry.results.values():
                poison(result)

    def _meet(self, tensor: torch.Tensor, written: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            ref = WeakStorage(storage)
            (self.writes if written else self.reads)[storage._cdata] = ref

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor | Place:
        """What is outside the recording: a graph knows its address, and does not keep it alive."""
        if not in_memory(tensor) or key_of(tensor) in self._own:
            return tensor
        return Place(tensor)

    def _save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own and storage._cdata not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage._cdata] = whole, whole.clone()


def found(value: Any) -> Any:
    """An argument with the tensors that are at its places."""
    if isinstance(value, tuple | list):
        return type(value)(found(each) for each in value)
    return value.tensor() if isinstance(value, Place) else value


def poison(tensor: torch.Tensor) -> None:
    """Fill with what is wrong wherever it is used."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max - 90)
