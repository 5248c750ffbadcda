"""Routers: which experts a token takes, and with which weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

__all__ = ["GroupedRouter", "Route", "SoftmaxRouter", "SparseMixer", "scaled_by_expert"]

#: `[tokens, hidden]` to `[tokens, experts]`.
Logits: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"

#: `[tokens, hidden]` to weights float32 and experts int64, `[tokens, active]` both.
Route: TypeAlias = "Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]"


class SoftmaxRouter:
    """The `active` likeliest experts by the softmax of the logits. With `normalise` their weights
    sum to one."""

    def __init__(self, logits: Logits, active: int, normalise: bool) -> None:
        self._logits = logits
        self._active = active
        self._normalise = normalise

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(x).float()
        best, chosen = logits.topk(self._active, dim=-1)
        if self._normalise:
            return best.softmax(dim=-1), chosen
        return (best - logits.logsumexp(dim=-1, keepdim=True)).exp(), chosen


class GroupedRouter:
    """The `active` best experts of the `active_groups` best of `groups` groups. Scores are the
    softmax of the logits (DeepSeek-V2), or with `sigmoid` the sigmoid of each (DeepSeek-V3).
    `correction` float32 `[experts]` is added to the scores for the choice only. A group's score is
    the sum of its `group_best` best experts' scores."""

    def __init__(
        self,
        logits: Logits,
        active: int,
        normalise: bool,
        *,
        sigmoid: bool,
        groups: int,
        active_groups: int,
        group_best: int,
        correction: torch.Tensor | None,
        scale: float,
        epsilon: float = 1e-20,
    ) -> None:
        """`epsilon` is added to the sum of a token's weights where these are normalised."""
        self._logits = logits
        self._active = active
        self._normalise = normalise
        self._epsilon = epsilon
        self._sigmoid = sigmoid
        self._groups = groups
        self._active_groups = active_groups
        self._group_best = group_best
        self._correction = correction
        self._scale = scale

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(x).float()
        scores = logits.sigmoid() if self._sigmoid else logits.softmax(dim=-1)
        choice = scores if self._correction is None else scores + self._correction
        if self._groups > 1:
            choice = self._best_groups(choice)
        chosen = choice.topk(self._active, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self._normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self._epsilon)
        return weights * self._scale, chosen

    def _best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """`choice` `[tokens, experts]`, minus infinity outside each token's best groups."""
        grouped = choice.view(choice.shape[0], self._groups, -1)
        best = grouped.topk(self._group_best, dim=-1).values.sum(dim=-1)
        kept = best.topk(self._active_groups, dim=-1).indices
        hidden = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(hidden[:, :, None], float("-inf")).flatten(1)


class SparseMixer:
    """The two experts of SparseMixer (Liu et al., 2024): the best by the logits, and the best of
    the others. The weight of each is its softmax among those that are as good, which are at most
    `2 * jitter` below it, relative to the greater of the best and their own size."""

    def __init__(self, logits: Logits, jitter: float) -> None:
        self._logits = logits
        self._jitter = jitter

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(x).float()
        first, one = self._best(logits, logits)
        others = logits.scatter(1, one, float("-inf"))
        second, two = self._best(logits, others)
        return torch.cat((first, second), dim=1), torch.cat((one, two), dim=1)

    def _best(self, logits: torch.Tensor, among: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight of the best of `among` and its number, `[tokens, 1]` both."""
        best, chosen = among.max(dim=1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * self._jitter
        return among.masked_fill(far, float("-inf")).softmax(dim=1).gather(1, chosen), chosen


def scaled_by_expert(route: Route, scale: torch.Tensor) -> Route:
    """`route` with each expert's weight multiplied by its own number in `scale` float32
    `[experts]`."""

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = route(x)
        return weights * scale[chosen], chosen

    return both
