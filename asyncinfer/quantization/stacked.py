"""`StackedWeight`: matrices of several formats that one layer computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from asyncinfer.quantization.blocks import BlockWeight
from asyncinfer.quantization.laid import LaidWeight
from asyncinfer.quantization.packed_weight import PackedWeight
from asyncinfer.quantization.weight import QuantisedWeight

__all__ = ["StackedWeight", "stacked"]


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight(PackedWeight):
    """Weights `[out, in]` stacked along their outputs, each in its own format: queries and keys of
    4 bits above values of 6, as in many files."""

    parts: tuple[PackedWeight, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __getitem__(self, index: int | slice | torch.Tensor) -> PackedWeight:
        if not isinstance(index, torch.Tensor):
            index = torch.arange(self.shape[0])[index].reshape(-1)
        sizes = torch.tensor([part.shape[0] for part in self.parts])
        ends = sizes.cumsum(0)
        owners = torch.searchsorted(ends, index, right=True)
        # Neighbouring rows of one part stay together.
        runs, counts = torch.unique_consecutive(owners, return_counts=True)
        found = []
        for owner, rows in zip(runs.tolist(), torch.split(index, counts.tolist()), strict=True):
            part, chosen = self.parts[owner], rows - (ends[owner] - sizes[owner])
            whole = torch.equal(chosen, torch.arange(part.shape[0]))
            found.append(part if whole else part[chosen])
        return stacked(found)

    def clone(self) -> StackedWeight:
        return replace(self, parts=tuple(part.clone() for part in self.parts))

    def view(self, *leading: int) -> PackedWeight | torch.Tensor:
        if len(leading) == 1:
            return self
        # Experts are of one format: 8-bit whole numbers if these hold all of them, else floats.
        parts = [
            part.grouped() if isinstance(part, BlockWeight | LaidWeight) else part
            for part in self.parts
        ]
        grouped = [part for part in parts if isinstance(part, QuantisedWeight)]
        if len(grouped) == len(parts) and QuantisedWeight.joinable(grouped):
            return QuantisedWeight.cat(grouped).view(*leading)
        return self.dequantised().view(*leading, -1)

    def dequantised(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.cat([part.dequantised(dtype) for part in self.parts])


def stacked(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Rows of weights `[out, in]` stacked; neighbours of one format are merged."""
    parts: list[PackedWeight] = []
    for _, run in groupby(weights, _format):
        alike = list(run)
        if isinstance(alike[0], BlockWeight):
            parts.append(BlockWeight.cat([one for one in alike if isinstance(one, BlockWeight)]))
        elif isinstance(alike[0], QuantisedWeight):
            both = [one for one in alike if isinstance(one, QuantisedWeight)]
            parts.append(QuantisedWeight.cat(both))
        else:
            parts += alike
    return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts), parts[0].dtype)


def _format(weight: PackedWeight) -> tuple[str, int]:
    """The properties that merged weights share: the code, and the numbers that share a scale."""
    if isinstance(weight, BlockWeight):
        return weight.code, 0
    if isinstance(weight, QuantisedWeight):
        return weight.named, weight.group
    return "", 0
