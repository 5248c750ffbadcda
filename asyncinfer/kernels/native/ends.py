"""What comes before a model's layers and after its head, on a CPU: rows of tables, and the largest
number of each row. Native code of both can be recorded with the layers."""

from __future__ import annotations

import functools
from contextlib import suppress

import torch

from asyncinfer.kernels.dispatch import CannotRecord
from asyncinfer.kernels.native.calls import empty, team
from asyncinfer.kernels.native.ends_code import NAMES, ends_code
from asyncinfer.kernels.native.host import Host, compiled_once, host
from asyncinfer.kernels.native.row_kernels import RowKernels
from asyncinfer.kernels.native.threads import parallel_region

__all__ = ["EndKernels", "end_kernels", "prepare_recording"]

#: Arguments of each function.
_ARGUMENTS = dict(zip(NAMES, (4, 5), strict=True))
_DTYPES = ("torch.float32", "torch.bfloat16")


class EndKernels(RowKernels):
    """Functions for numbers of one dtype."""

    __slots__ = ("_first", "_lanes")

    def __init__(self, dtype: torch.dtype, target: Host, region: int) -> None:
        """`region`: the address of `GOMP_parallel`. Raises `RuntimeError` where the code cannot be
        made."""
        self._lanes = target.lanes
        #: The place of the first row.
        self._first = torch.zeros(1, dtype=torch.int64)
        name = str(dtype).removeprefix("torch.")
        text = functools.partial(ends_code, name, target.lanes)
        super().__init__(f"ends {name}", text, dtype, target, region, _ARGUMENTS)

    def take(self, y: torch.Tensor, x: torch.Tensor, places: torch.Tensor) -> bool:
        """Copy the rows of `x` `[any, ...]` that int64 `places` `[rows]` name to `y` `[rows, ...]`,
        both of any dtype; False where torch must do it. Each place is one of `x`: nobody looks."""
        plain = all(type(each) is torch.Tensor and each.is_contiguous() for each in (y, x, places))
        if not plain or y.dtype is not x.dtype or y.shape[1:] != x.shape[1:]:
            return False
        size = x[0].numel()
        addresses = y.data_ptr(), x.data_ptr(), places.data_ptr()
        self.call("take", len(places), size, *addresses, size * x.dtype.itemsize)
        return True

    def copy(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Copy `x` to `y`, both `[size]` of one dtype and without gaps."""
        copied = self.take(y[None], x[None], self._first)
        assert copied

    def largest(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`x.max(dim=-1)` of `x` `[rows, size]`: float32 values and the int64 places of the first
        of each, `[rows]`. None where torch must do it."""
        rows, size = x.shape
        if size < self._lanes or not self.plain(x) or x.stride(1) != 1:
            return None
        values, places = empty(rows), empty(rows, dtype=torch.int64)
        addresses = values.data_ptr(), places.data_ptr(), x.data_ptr()
        self.call("largest", rows, size, *addresses, size, x.stride(0))
        return values, places


def end_kernels(dtype: torch.dtype) -> EndKernels | None:
    """The functions for this dtype, compiled by their first caller. None without `llvmlite`, on
    other processors, where torch's threads cannot be used, and after a failed trial."""
    target, region = host(), parallel_region()
    if target is None or region is None or str(dtype) not in _DTYPES:
        return None
    return trusted_kernels(dtype, target, region)


def prepare_recording(dtype: torch.dtype) -> None:
    """Compile what recordings need besides their layers' code, so that no step waits for it."""
    end_kernels(dtype)
    with suppress(CannotRecord, RuntimeError):
        team()


@compiled_once
def trusted_kernels(dtype: torch.dtype, target: Host, region: int) -> EndKernels | None:
    """The functions, if a trial is right."""
    kernels = EndKernels(dtype, target, region)
    return kernels if is_right(kernels, dtype) else None


def is_right(kernels: EndKernels, dtype: torch.dtype) -> bool:
    """Whether a few rows agree with torch's results."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(3, 50, generator=generator, dtype=torch.float32).to(dtype)
    # The last row's largest number is there twice, and the second row has none.
    x[2, 17] = x[2, 40] = 9
    x[1, 30] = float("nan")
    found, (values, places) = kernels.largest(x[:, :45]), x[:, :45].float().max(dim=-1)
    places_of = torch.tensor([2, 0, 2])
    taken = torch.empty_like(x)
    return (
        found is not None
        and torch.allclose(found[0], values, rtol=0, atol=0, equal_nan=True)
        and torch.equal(found[1][::2], places[::2])
        and kernels.take(taken, x, places_of)
        and taken.view(torch.int16).equal(x[places_of].view(torch.int16))
    )
