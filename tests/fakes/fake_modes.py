"""What a `FakeDevice` sees of torch: every operator, and every call that Python makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from fakes.weak_storage import in_memory, tensors_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CountCalls", "WatchOperators", "host_must_wait", "written_by"]

#: What cannot be done without the host waiting for the device.
_SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


#: What reads a tensor in the host's memory without an operator: a GPU would be waited for.
_HOST_READS = ("tolist", "numpy", "cpu", "__array__")


class WatchOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator to `operate(operator, args, kwargs)` instead."""

    def __init__(self, operate: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operate = operate

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._operate(func, args, kwargs or {})


class CountCalls(TorchFunctionMode):
    """Counts calls by name; attributes are not in it. Before a tensor's values are read in a way
    that is no operator, `reads(name, tensor)` is asked."""

    def __init__(self, calls: Counter[str], reads: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._calls = calls
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in ("__get__", "untyped_storage"):
            self._calls[name] += 1
            if name in _HOST_READS:
                self._reads(name, args[0])
        return func(*args, **(kwargs or {}))


def written_by(operator: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator changes."""
    values = (
        args[index] if index < len(args) else kwargs.get(name) for index, name in _changed(operator)
    )
    return [tensor for value in values for tensor in tensors_of(value)]


@cache
def _changed(operator: Any) -> list[tuple[int, str]]:
    arguments = enumerate(operator._schema.arguments)
    return [(i, each.name) for i, each in arguments if each.alias_info and each.alias_info.is_write]


def host_must_wait(name: str, args: Any) -> bool:
    """Whether the host has to wait to know what an operator gives."""
    if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple):
        return any(in_memory(tensor) and tensor.dtype is torch.bool for tensor in args[1])
    return name in _SYNCS
