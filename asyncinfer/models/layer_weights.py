"""`LayerWeights`: the tensors and linear layers that a model is built of."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch

from asyncinfer.quantization import (
    GroupedLinear,
    HeldWeight,
    Linear,
    PackedRows,
    PackedWeight,
    SeparateLinears,
    as_tensor,
    held_for_rows,
    hold,
    make_grouped_linear,
    make_linear,
)
from asyncinfer.weights import WeightCopy, WeightSource

__all__ = ["LayerWeights"]

_Weight: TypeAlias = "torch.Tensor | PackedWeight"


class LayerWeights:
    """Takes each tensor of a table from its source when it is asked for, best in the table's order.
    What a `copy` holds is taken from there, and what it lacks is added to it."""

    def __init__(
        self, weights: WeightSource, storage: str = "plain", copy: WeightCopy | None = None
    ) -> None:
        """`storage`: the format of the linear layers, as in `make_linear`."""
        self._weights = weights
        self._storage = storage
        self._copy = copy

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of this name in the table, as floats."""
        found = self._held(name, lambda: as_tensor(self._weights(name)))
        assert isinstance(found, torch.Tensor)
        return found

    def rows(self, name: str) -> torch.Tensor | PackedRows:
        """A matrix whose rows are looked up."""

        def held() -> HeldWeight:
            rows = held_for_rows(self._weights(name))
            return rows.weight if isinstance(rows, PackedRows) else rows

        found = self._held(name, held)
        assert isinstance(found, torch.Tensor | PackedWeight)
        return held_for_rows(found)

    def linear(self, name: str, bias: bool, storage: str | None = None) -> Linear:
        """The linear layer of this name. `storage`: None takes that of all layers."""
        weight = f"{name}.weight"
        return self._layer(name, lambda: self._weights(weight), bias, storage or self._storage)

    def head(self, tied: torch.Tensor | PackedRows | None, bias: bool) -> Linear:
        """The layer of the logits, whose format is never changed. `tied`: the embedding that is its
        weight, too."""
        if tied is None:
            return self.linear("head", bias, "plain")
        if isinstance(tied, PackedRows):
            return make_linear(tied, self._bias("head", bias))
        return self._layer("head", lambda: tied, bias, "plain")

    def grouped(self, name: str, bias: bool, experts: int) -> GroupedLinear:
        """The linear layers of this name, one for each of so many experts."""
        weight, storage = f"{name}.weight", self._storage
        if self._copy is None:
            return make_grouped_linear(
                self._weights(weight), self._bias(name, bias), storage=storage
            )
        # Experts that the copy holds are not read.
        whole = cache(lambda: self._weights(weight))

        def matrix(expert: int) -> HeldWeight:
            return self._matrix(f"{weight}[{expert}]", lambda: whole()[expert], storage)

        each = [matrix(expert) for expert in range(experts)]
        return SeparateLinears(each, self._bias(name, bias), self._left(each[0], storage))

    def _layer(self, name: str, weight: Callable[[], _Weight], bias: bool, storage: str) -> Linear:
        held = self._matrix(f"{name}.weight", weight, storage)
        return make_linear(held, self._bias(name, bias), storage=self._left(held, storage))

    def _matrix(self, name: str, weight: Callable[[], _Weight], storage: str) -> HeldWeight:
        """A matrix as it is; of a copy, as its layer holds it."""
        if self._copy is None:
            return weight()
        return self._copy.held(name, lambda: hold(weight(), storage))

    def _left(self, held: HeldWeight, storage: str) -> str:
        """The format that is left to be made of a matrix."""
        made = self._copy is not None and not isinstance(held, torch.Tensor)
        return "plain" if made else storage

    def _bias(self, name: str, bias: bool) -> torch.Tensor | None:
        return self.tensor(f"{name}.bias") if bias else None

    def _held(self, name: str, made: Callable[[], HeldWeight]) -> HeldWeight:
        return made() if self._copy is None else self._copy.held(name, made)
