"""Where a weight in oneDNN's layout lies, and such weights in memory that something else fills.

torch's own operators tell the first. The second is the interface that its compiled models use to
take weights from their files, of which torch keeps the binary form: functions in C.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["can_place", "first_numbers", "layout_of", "place_of", "placed"]

#: `c10::Layout::Mkldnn`, and its device type of a CPU.
_MKLDNN: Final = 3
_CPU: Final = 0
_long = ctypes.c_int64
_int = ctypes.c_int32
_pointer = ctypes.c_void_p
#: What `aoti_torch_create_tensor_from_blob_v2` takes: the memory, dimensions, sizes, strides,
#: offset, dtype, device, its index, the tensor that is made, layout, its description, and bytes.
_MADE: Final = (
    *(_pointer, _long, _pointer, _pointer, _long, _int, _int, _int),
    *(_pointer, _int, ctypes.c_char_p, _long),
)


def place_of(weight: torch.Tensor) -> tuple[int, int] | None:
    """The address and the bytes of a reordered weight; None where torch does not tell."""
    ops = torch.ops.mkldnn
    if not hasattr(ops, "data_ptr") or not hasattr(ops, "_nbytes"):
        return None
    return int(ops.data_ptr(weight)), int(ops._nbytes(weight))


def first_numbers(weight: torch.Tensor, count: int) -> torch.Tensor | None:
    """A copy of the first numbers `[count]` in the memory of a reordered weight; None as in
    `place_of`."""
    found = place_of(weight)
    if found is None:
        return None
    place, nbytes = found
    numbers = torch.frombuffer((ctypes.c_char * nbytes).from_address(place), dtype=weight.dtype)
    return numbers[:count].clone()


def layout_of(weight: torch.Tensor) -> bytes:
    """How the numbers of a reordered weight are ordered, for `placed` of the same version of torch.
    Call it where `can_place`."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(weight).tolist())


def can_place() -> bool:
    """Whether this torch makes a reordered weight of memory."""
    return hasattr(torch.ops.mkldnn, "_get_mkldnn_serialized_md") and _functions() is not None


def placed(
    memory: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, layout: bytes
) -> torch.Tensor:
    """The reordered weight `[out, in]` whose bytes are `memory`, uint8, which the caller keeps.
    Raises `RuntimeError` where torch cannot make it."""
    found = _functions()
    if found is None:
        raise RuntimeError("this torch makes no weights of memory")
    made, take, dtypes = found
    sizes, strides = (_long * 2)(*shape), (_long * 2)(shape[1], 1)
    handle = _pointer()
    fault = made(
        *(memory.data_ptr(), 2, sizes, strides, 0, dtypes[dtype], _CPU, 0),
        *(ctypes.byref(handle), _MKLDNN, layout, len(layout)),
    )
    if fault:
        raise RuntimeError("torch does not take this layout")
    return take(handle)


@functools.cache
def _functions() -> tuple[Any, Callable[[Any], torch.Tensor], dict[torch.dtype, int]] | None:
    """Torch's function that makes a tensor, what takes the tensor from its handle, and the numbers
    of dtypes; None where this torch lacks one of them."""
    steal = getattr(
        getattr(torch._C, "_aoti", None), "alloc_tensor_by_stealing_from_void_ptr", None
    )
    try:
        library = ctypes.CDLL(torch._C.__file__)
        made = library.aoti_torch_create_tensor_from_blob_v2
        numbers = {
            torch.float32: library.aoti_torch_dtype_float32,
            torch.bfloat16: library.aoti_torch_dtype_bfloat16,
        }
    except (OSError, AttributeError):
        return None
    if steal is None:
        return None
    made.argtypes, made.restype = _MADE, _int
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (_pointer, _pointer, _pointer)

    def take(handle: Any) -> torch.Tensor:
        tensor: torch.Tensor = steal(capsule(handle, None, None))
        return tensor

    return made, take, {dtype: int(number()) for dtype, number in numbers.items()}
