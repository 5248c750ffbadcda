"""The order of rows and heads in the tensors of a gated delta net."""

from __future__ import annotations

import torch

from asyncinfer.models.names import TensorNames
from asyncinfer.models.parts import GatedDeltaConfig
from asyncinfer.quantization import (
    BlockWeight,
    LaidWeight,
    PackedWeight,
    QuantisedWeight,
    as_tensor,
)

__all__ = ["delta_outputs", "delta_rows"]


def delta_rows(
    names: TensorNames, mixer: GatedDeltaConfig, tensor: torch.Tensor, part: str
) -> torch.Tensor:
    """Rows of a net's `part`, by its name in the tensor table: kind after kind, and value heads of
    one key head together. A tensor with the rows of all kinds has them key head by key head."""
    shared, inner = mixer.heads // mixer.key_heads, mixer.heads * mixer.value_dim
    kinds = {"in": (names.delta_in, [mixer.key_dim] * 2 + [shared * mixer.value_dim] * 2)}
    kinds["gates"] = (names.delta_gates, [shared] * 2)
    if part in kinds and len(kinds[part][0]) == 1:
        sizes = kinds[part][1]
        rows = tensor.view(mixer.key_heads, sum(sizes), *tensor.shape[1:])
        return torch.cat([kind.flatten(0, 1) for kind in torch.split(rows, sizes, 1)])
    if not names.delta_tiled or part == "out":
        return tensor
    # The rows of values and gates, of beta and step, of the convolved values, or of each head.
    known = {"in": (inner, inner), "gates": (mixer.heads, mixer.heads), "conv": (inner,)}
    runs = known.get(part, (mixer.heads,))
    before, *tiled = torch.split(tensor, [len(tensor) - sum(runs), *runs])
    return torch.cat([before, *(_untiled(mixer, rows) for rows in tiled)])


def delta_outputs(
    mixer: GatedDeltaConfig, weight: torch.Tensor | PackedWeight
) -> torch.Tensor | PackedWeight:
    """The projection after a net, `[out, in]`, with its inputs in the order of `delta_rows`."""
    shared = mixer.heads // mixer.key_heads
    if isinstance(weight, BlockWeight | LaidWeight):  # A block may hold several heads.
        weight = weight.grouped()
    if isinstance(weight, QuantisedWeight) and mixer.value_dim % weight.group == 0:
        return weight.inputs_swapped(shared, mixer.key_heads)
    return _untiled(mixer, as_tensor(weight).t()).t().contiguous()


def _untiled(mixer: GatedDeltaConfig, rows: torch.Tensor) -> torch.Tensor:
    shared = mixer.heads // mixer.key_heads
    heads = rows.view(shared, mixer.key_heads, -1, *rows.shape[1:])
    return heads.transpose(0, 1).reshape(rows.shape)
