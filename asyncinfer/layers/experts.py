"""The mixture of experts (Shazeer et al., 2017): a feed-forward layer of which each token takes a
few parts, chosen by a router."""

from __future__ import annotations

import torch

from asyncinfer.layers.activation import Activation
from asyncinfer.quantization import GroupedLinear, Linear

__all__ = ["Experts"]


class Experts:
    """`[tokens, hidden]` to `[tokens, hidden]`: the sum of what each token's `active` best experts
    make of it, weighted by the router's softmax. With `normalise` a token's weights sum to one.

    Every token is repeated for its experts, the rows are sorted by expert, and each of the two
    linear layers is one grouped product. Nothing depends on what else is in the batch.
    """

    def __init__(
        self,
        router: Linear,
        active: int,
        normalise: bool,
        up: GroupedLinear,
        activation: Activation,
        down: GroupedLinear,
        numbers: torch.Tensor,
    ) -> None:
        """`numbers` int64 `[experts]`: 0, 1, ... on the model's device."""
        self._router = router
        self._active = active
        self._normalise = normalise
        self._up = up
        self._activation = activation
        self._down = down
        self._numbers = numbers

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._route(x)
        sorted_experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_experts, self._numbers, right=True, out_int32=True)
        rows = x.index_select(0, order // self._active)
        rows = self._down(self._activation(self._up(rows, ends)), ends)
        parts = torch.empty_like(rows).index_copy_(0, order, rows)
        parts = parts.view(x.shape[0], self._active, -1)
        return (weights[:, None].to(x.dtype) @ parts)[:, 0]

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 and int64 `[tokens, active]`: weights, and the experts that they are of."""
        logits = self._router(x).float()
        best, chosen = logits.topk(self._active, dim=-1)
        if self._normalise:
            return best.softmax(dim=-1), chosen
        return (best - logits.logsumexp(dim=-1, keepdim=True)).exp(), chosen
