"""The cases of a trial of products with quantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import torch

from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.reference.floats_of import CODES
from asyncinfer.kernels.trial_numbers import Case, Numbers

__all__ = ["quantised_products", "quantised_weight"]

#: Tokens of a product: one for each kind of tile.
_ROWS: Final = (1, 16, 64)
#: Rows of a mixture's product: some by themselves, and enough for tiles.
_EXPERT_ROWS: Final = (4, 130)
_EXPERTS: Final = 2
#: About the largest value of each code.
_LARGEST: Final = {"int4": 15.0, "e2m1": 6.0, "iq4": 127.0, "int8": 127.0, "e4m3": 448.0}


def quantised_products(
    layout: WeightLayout, hidden: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Case]]:
    """Each kernel's name and its case, for a layout that kernels read: products of few tokens, and
    of many tokens, which are computed as a mixture with a single expert."""
    group = layout.group or 1
    inputs = -(-hidden // group) * group

    def few(rows: int) -> Case:
        def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
            numbers = Numbers(device, dtype, wanted)
            options = quantised_weight(numbers, layout, hidden, inputs)
            x, added = numbers(rows, inputs), numbers(rows, hidden)
            return (module.linear_small(x, **options, norm=numbers(inputs), residual=added),)

        return case

    def grouped(rows: int) -> Case:
        def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
            numbers = Numbers(device, dtype, wanted)
            options = quantised_weight(numbers, layout, _EXPERTS, hidden, inputs)
            ends = torch.tensor([rows // 3, rows], dtype=torch.int32, device=device)
            return (module.grouped_linear(numbers(rows, inputs), ends=ends, **options),)

        return case

    for rows in _ROWS:
        yield f"linear_small of {rows} rows, {layout}", few(rows)
    for rows in _EXPERT_ROWS:
        yield f"grouped_linear of {rows} rows, {layout}", grouped(rows)


def quantised_weight(numbers: Numbers, layout: WeightLayout, *shape: int) -> dict[str, Any]:
    """A weight `[..., outputs, inputs]` with its scales and offsets, as arguments of a product."""
    inputs = shape[-1]
    held = CODES[layout.code]
    packed = numbers.bytes(*shape[:-1], inputs // held)
    if held == 1:
        packed = packed.view(torch.int8)
    if layout.code == "e4m3":
        # No weight has a NaN.
        packed = torch.where((packed & 127) == 127, 0, packed)
    groups = (*shape[:-1], inputs // layout.group if layout.group else 1)
    scales = numbers(*groups).float().abs().add(0.5).mul(inputs**-0.5 / _LARGEST[layout.code])
    if layout.powers:
        scales = scales.log2().round().exp2().to(torch.float8_e8m0fnu)
    elif layout.group or layout.offsets:
        scales = scales.half()
    offsets = None
    if layout.offsets:
        offsets = (scales.float() * -_LARGEST[layout.code] / 2).half()
    return {"weight": packed, "scales": scales, "offsets": offsets, "code": layout.code}
