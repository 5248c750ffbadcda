"""`RowKernels`: functions of `RowTasks`, which compute each row by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from asyncinfer.kernels.native.calls import (
    ALWAYS,
    NEVER,
    native_functions,
    room_rows,
    room_threads,
)
from asyncinfer.kernels.native.host import Host
from asyncinfer.kernels.native.row_tasks import HEAD

__all__ = ["RowKernels"]

#: Numbers above which another thread saves more than it costs.
_ALONE = 1 << 16
#: Turns of each thread, so that threads end at about the same time.
_TURNS = 4


class RowKernels:
    """Functions for numbers of one dtype."""

    __slots__ = ("_calls", "_dtype")

    def __init__(
        self,
        what: str,
        text: Callable[[], str],
        dtype: torch.dtype,
        target: Host,
        region: int,
        arguments: Mapping[str, int],
    ) -> None:
        """`what` and `text`: see `compiled`; `arguments`: each function's number of them; `region`:
        the address of `GOMP_parallel`. Raises `RuntimeError` where the code cannot be made."""
        self._dtype = dtype
        fields = {name: (*HEAD, *("",) * count) for name, count in arguments.items()}
        self._calls = native_functions(what, text, target, region, fields, "rows", "turn")

    def call(self, name: str, rows: int, size: int, *arguments: int) -> None:
        """Call the function for rows of `size` numbers, on torch's threads where these pay."""
        most = room_rows(rows)
        shared = most > 1 and most * size > _ALONE
        threads = torch.get_num_threads() if shared else 1
        turn = -(-rows // (room_threads(threads) * _TURNS)) if shared else rows
        above = ALWAYS if shared else NEVER
        self._calls[name](rows, turn, threads, 0, *arguments, shared_above=above)

    def plain(self, x: torch.Tensor) -> bool:
        """Whether the tensor has numbers of the dtype in memory and needs no gradient."""
        return type(x) is torch.Tensor and x.dtype is self._dtype and not x.requires_grad

    def dense(self, x: torch.Tensor) -> bool:
        """Whether they lie side by side, too."""
        return self.plain(x) and x.is_contiguous()
