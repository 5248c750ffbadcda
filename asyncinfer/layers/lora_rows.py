"""The adapters of a forward pass: rows that the host knows on a CPU, kernels on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.native import LoraKernel
from asyncinfer.layers.lora import LoraLayers, LoraRows, LoraWeights

__all__ = ["DeviceLoraRows", "GroupedLoraRows", "JoinedLoraRows"]

I64 = npt.NDArray[np.int64]

#: From so many neighbouring tokens of one adapter on, they are a product of their own: without a
#: kernel, and with one.
_SPAN, _KERNEL_SPAN = 8, 32


class DeviceLoraRows:
    """Adapters by a tensor of slots, which a recorded step reads anew each time it is replayed."""

    def __init__(self, layers: LoraLayers, slots: torch.Tensor) -> None:
        """`slots` int32 `[tokens]`: each token's adapter, -1 for none."""
        self._layers = layers
        self._slots = slots

    def add(self, layer: str, x: torch.Tensor, y: torch.Tensor) -> None:
        weights = self._layers.get(layer)
        if weights is not None:
            ops.lora_add(
                y, x, weights.down, weights.up, weights.ranks, self._slots, sizes=weights.sizes
            )

    def part(self, first: int, end: int) -> DeviceLoraRows:
        return DeviceLoraRows(self._layers, self._slots[first:end])


class JoinedLoraRows:
    """Rows whose adapters lie in several places, such as those of several dtypes."""

    def __init__(self, parts: Sequence[LoraRows]) -> None:
        """Each token has its adapter in one of the `parts`, and none in the others."""
        self._parts = parts

    def add(self, layer: str, x: torch.Tensor, y: torch.Tensor) -> None:
        for part in self._parts:
            part.add(layer, x, y)

    def part(self, first: int, end: int) -> JoinedLoraRows:
        return JoinedLoraRows([part.part(first, end) for part in self._parts])


class GroupedLoraRows:
    """Adapters of rows that the host knows, for CPUs.

    Neighbours of one adapter, such as a prompt's, are two products of slices. Tokens that stand
    alone are given to a kernel for the processor at hand. Where there is none, they are grouped by
    adapter and padded to groups of one size, so that all of them are two batched products, which
    read each adapter's matrices where they lie. Where groups would be mostly padding, each
    adapter's are products of their own.
    """

    def __init__(
        self,
        layers: LoraLayers,
        slots: I64,
        *,
        kernel: LoraKernel | None = None,
        apart: bool = False,
    ) -> None:
        """`slots` int64 `[tokens]`: each token's adapter, -1 for none. `apart`: each token is
        computed by itself, so that no product depends on the others."""
        self._layers = layers
        self._slots = slots
        self._kernel = kernel
        self._apart = apart
        #: Slots and tokens of the kernel, int64, those of an adapter side by side.
        self._single: tuple[torch.Tensor, torch.Tensor] | None = None
        #: Slot, first token, and the token after the last.
        self._spans: list[tuple[int, int, int]] = []
        #: Slot, and the tokens that have it.
        self._alone: list[tuple[int, torch.Tensor]] = []
        #: The slots `first .. end - 1`; the tokens of their groups; places in the groups, and the
        #: token whose result is at each.
        self._groups: tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._arrange()

    def add(self, layer: str, x: torch.Tensor, y: torch.Tensor) -> None:
        weights = self._layers.get(layer)
        if weights is None:
            return
        for slot, first, end in self._spans:
            _add_one(weights, slot, x[first:end], y[first:end])
        if self._kernel is not None:
            if self._single is not None:
                self._add_single(self._kernel, weights, x, y)
            return
        for slot, rows in self._alone:
            if weights.host_ranks[slot]:
                part = torch.zeros(len(rows), y.shape[1], dtype=y.dtype)
                _add_one(weights, slot, x.index_select(0, rows), part)
                y.index_add_(0, rows, part)
        if self._groups is not None:
            self._add_groups(weights, x, y)

    def part(self, first: int, end: int) -> GroupedLoraRows:
        return GroupedLoraRows(
            self._layers, self._slots[first:end], kernel=self._kernel, apart=self._apart
        )

    def _arrange(self) -> None:
        slots = self._slots
        if self._apart and self._kernel is not None:
            self._keep_single(np.flatnonzero(slots >= 0))
            return
        if self._apart:
            for row in np.flatnonzero(slots >= 0).tolist():
                self._alone.append((int(slots[row]), torch.tensor([row])))
            return
        span = _SPAN if self._kernel is None else _KERNEL_SPAN
        starts = np.flatnonzero(np.diff(slots, prepend=-2))
        single = np.zeros(len(slots), np.bool_)
        for first, end in zip(starts.tolist(), [*starts[1:].tolist(), len(slots)], strict=True):
            if slots[first] < 0:
                continue
            if end - first >= span:
                self._spans.append((int(slots[first]), first, end))
            else:
                single[first:end] = True
        rows = np.flatnonzero(single)
        if self._kernel is not None:
            self._keep_single(rows)
            return
        if not len(rows):
            return
        theirs = slots[rows]
        used, counts = np.unique(theirs, return_counts=True)
        first, end, most = int(used[0]), int(used[-1]) + 1, int(counts.max())
        if len(used) == 1 or (end - first) * most > 2 * len(rows) + _SPAN:
            for slot in used.tolist():
                self._alone.append((slot, torch.from_numpy(rows[theirs == slot])))
            return
        order = np.argsort(theirs, kind="stable")
        rows, theirs = rows[order], theirs[order]
        # The place of each row in its group; rows are sorted by group.
        within = np.arange(len(rows)) - np.searchsorted(theirs, theirs)
        places = (theirs - first) * most + within
        # Padding computes the first row again, and the result is dropped.
        members = np.full((end - first) * most, rows[0])
        members[places] = rows
        self._groups = (
            first,
            end,
            torch.from_numpy(members),
            torch.from_numpy(places),
            torch.from_numpy(rows),
        )

    def _keep_single(self, rows: I64) -> None:
        if len(rows):
            # What one row reads of an adapter is in the cache for the next.
            rows = rows[np.argsort(self._slots[rows], kind="stable")]
            self._single = torch.from_numpy(self._slots[rows]), torch.from_numpy(rows)

    def _add_single(
        self, kernel: LoraKernel, weights: LoraWeights, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        assert self._single is not None
        slots, rows = self._single
        kernel(y, x, weights.down, weights.up, weights.ranks, slots, rows, sizes=weights.sizes)

    def _add_groups(self, weights: LoraWeights, x: torch.Tensor, y: torch.Tensor) -> None:
        assert self._groups is not None
        first, end, members, places, rows = self._groups
        rank = max(weights.host_ranks[first:end])
        if not rank:
            return
        parts = len(weights.sizes)
        groups = x.index_select(0, members).view(end - first, -1, x.shape[1])
        down = weights.down[first:end, : rank * parts].transpose(1, 2)
        inner = torch.bmm(groups, down)
        deltas = [
            torch.bmm(inner[:, :, part::parts], weights.up[first:end, :rank, columns])
            for part, columns in enumerate(_columns(weights))
        ]
        delta = deltas[0] if parts == 1 else torch.cat(deltas, dim=2)
        y.index_add_(0, rows, delta.view(-1, y.shape[1]).index_select(0, places))


def _add_one(weights: LoraWeights, slot: int, x: torch.Tensor, y: torch.Tensor) -> None:
    """Add the product of one adapter with all rows of `x` to `y`, in place."""
    rank, parts = weights.host_ranks[slot], len(weights.sizes)
    if rank:
        inner = x @ weights.down[slot, : rank * parts].to(x.dtype).t()
        up = weights.up[slot, :rank].to(x.dtype)
        for part, columns in enumerate(_columns(weights)):
            y[:, columns].addmm_(inner[:, part::parts], up[:, columns])


def _columns(weights: LoraWeights) -> Iterator[slice]:
    """The columns of each projection."""
    start = 0
    for size in weights.sizes:
        yield slice(start, start + size)
        start += size
