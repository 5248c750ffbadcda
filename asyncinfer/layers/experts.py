"""The mixture of experts (Shazeer et al., 2017): a feed-forward layer of which each token takes a
few parts, chosen by a router."""

from __future__ import annotations

import torch

from asyncinfer.layers.activation import Activation
from asyncinfer.layers.lora import LoraRows
from asyncinfer.layers.norm import Norm
from asyncinfer.layers.router import Route
from asyncinfer.quantization import GroupedLinear

__all__ = ["Experts"]


class Experts:
    """`[tokens, hidden]` to `[tokens, hidden]`: the sum of the outputs of each token's experts,
    weighted by the router.

    Every token is repeated for its experts, the rows are sorted by expert, and each of the two
    linear layers is one grouped product. A token's result does not depend on the batch.
    """

    def __init__(
        self,
        route: Route,
        up: GroupedLinear,
        activation: Activation,
        down: GroupedLinear,
        numbers: torch.Tensor,
        *,
        norm: Norm | None = None,
        weigh_inputs: bool = False,
    ) -> None:
        """
        Args:
            numbers: int64 `[experts]`: 0, 1, ... on the model's device.
            norm: of what experts take. The router takes the input as it is.
            weigh_inputs: a token's weights multiply what its experts take, not what they give
                (Llama 4).
        """
        self._route = route
        self._up = up
        self._activation = activation
        self._down = down
        self._numbers = numbers
        self._weigh_inputs = weigh_inputs
        self._norm = norm

    def __call__(self, x: torch.Tensor, adapters: LoraRows | None = None) -> torch.Tensor:
        # No adapter changes experts: an adapter that would is refused when it is loaded.
        weights, chosen = self._route(x)
        sorted_experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_experts, self._numbers, right=True, out_int32=True)
        active = chosen.shape[1]
        rows = (x if self._norm is None else self._norm(x)).index_select(0, order // active)
        if self._weigh_inputs:
            rows.mul_(weights.flatten()[order, None])
        rows = self._down(self._activation(self._up(rows, ends)), ends)
        parts = torch.empty_like(rows).index_copy_(0, order, rows)
        parts = parts.view(x.shape[0], active, -1)
        if self._weigh_inputs:
            return parts.sum(1)
        return (weights[:, None].to(x.dtype) @ parts)[:, 0]
