"""Truncation: top-k, top-p, min-p and typical, each on what the filter before it left.

Every filter is a threshold: it keeps its last token and all that tie with that one. So the kept set
does not depend on how a sort orders equals, and it is never empty. A token that is cut gets the
weight 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.transfer import upload

__all__ = ["keep_likely", "keep_typical"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

#: Candidates that are sorted first when a mass has to be reached; these mostly suffice.
_CANDIDATES = 256
_BITS_OF_128 = 0x43000000


def keep_likely(
    scores: torch.Tensor, weights: torch.Tensor, top_k: I64, top_p: F64, min_p: F64
) -> None:
    """Top-k, then top-p, then min-p.

    Args:
        scores: float32 `[n, vocab]`, the largest of each row 0.
        weights: float32 `[n, vocab]`: `exp(scores)`; changed in place.
        top_k: int64 `[n]`, 0 keeps all.
        top_p: float64 `[n]`, 1 keeps all.
        min_p: float64 `[n]`, 0 keeps all.
    """
    device, vocab = scores.device, scores.shape[1]
    counted = (top_k > 0) & (top_k < vocab)
    nucleus = top_p < 1
    head = None
    if counted.any():
        best = scores.topk(int(top_k[counted].max()), dim=-1)
        last, off = upload(device, np.where(counted, top_k, 1)[:, None] - 1, ~counted[:, None])
        cut = best.values.gather(1, last).masked_fill_(off, -torch.inf)
        _keep(weights, scores, cut)
        if (counted | ~nucleus).all():
            head = best.indices
    if nucleus.any():
        share, off = upload(device, np.where(nucleus, top_p, 0.0)[:, None], ~nucleus[:, None])
        cut = _crossing(scores, weights, share, head).masked_fill_(off, -torch.inf)
        _keep(weights, scores, cut)
    if min_p.any():
        with np.errstate(divide="ignore"):
            (cut,) = upload(device, np.log(min_p[:, None]).astype(np.float32))
        _keep(weights, scores, cut)


def keep_typical(scores: torch.Tensor, weights: torch.Tensor, mass: F64) -> None:
    """Keep the tokens whose surprisal is nearest to the entropy, until they have `mass`
    (locally typical sampling, Meister et al. 2023).

    Args:
        scores: float32 `[n, vocab]`.
        weights: float32 `[n, vocab]`: `exp(scores)`, or 0 for what is cut; changed in place.
        mass: float64 `[n]`, below 1.
    """
    total = weights.sum(dim=-1, keepdim=True)
    # surprisal = log(total) - score, and the entropy is its mean: log(total) cancels.
    nearness = scores - (scores * weights).sum(dim=-1, keepdim=True) / total
    nearness = nearness.abs_().neg_().masked_fill_(weights == 0, -torch.inf)
    (share,) = upload(scores.device, mass[:, None])
    cut = _crossing(nearness, weights, share, None)
    _keep(weights, nearness, cut)


def _keep(weights: torch.Tensor, order: torch.Tensor, cut: torch.Tensor) -> None:
    """Set the weights of tokens that come after `cut` in `order` to 0."""
    # A comparison written out as 0.0 and 1.0 is several times faster than a mask of booleans.
    weights *= torch.ge(order, cut, out=torch.empty_like(order))


def _crossing(
    order: torch.Tensor, weights: torch.Tensor, share: torch.Tensor, head: torch.Tensor | None
) -> torch.Tensor:
    """`[n, 1]`: the entry of `order` at which the weights, best order first, sum to `share` of
    their total.

    `order` is float32 `[n, vocab]`, 0 at best, above -128 or -inf. `head` int64 `[n, k]` names the
    best tokens in order if they are known already: every token with a weight, except ties with the
    last of them. Sums are float64, so that they do not depend on how a device splits a row.
    """
    goal = weights.sum(dim=-1, keepdim=True, dtype=torch.float64).mul_(share)
    if head is not None:
        return _cross(order.gather(1, head), weights.gather(1, head), goal)[0]
    if order.device.type != "cpu":
        # Asking whether the candidates suffice would wait for the device.
        return _search(order, weights, goal)
    best = order.topk(min(_CANDIDATES, order.shape[1]), dim=-1)
    cut, reached = _cross(best.values, weights.gather(1, best.indices), goal)
    if best.indices.shape == order.shape or bool(reached.all()):
        return cut
    rows = (~reached).nonzero()[:, 0]
    cut[rows] = _search(order[rows], weights[rows], goal[rows])
    return cut


def _cross(
    order: torch.Tensor, weights: torch.Tensor, goal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entry of the sorted `order` at which the weights reach `goal` (else the last entry), and
    whether they do."""
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    before = (mass < goal).sum(dim=-1, keepdim=True)
    return order.gather(1, before.clamp_(max=order.shape[1] - 1)), mass[:, -1] >= goal[:, 0]


def _search(order: torch.Tensor, weights: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """`_crossing` by bisection, several times faster than a sort of the whole vocabulary.

    The bits of positive floats are in the order of their values, so halving the interval between
    two of them 31 times finds the entry exactly.
    """
    distance = order.abs()
    kept = torch.empty_like(weights)
    # The bits of -1 are a NaN, and no distance is at most NaN.
    low = torch.full_like(goal, -1, dtype=torch.int32)
    high = torch.full_like(goal, _BITS_OF_128, dtype=torch.int32)
    for _ in range(31):
        middle = low + ((high - low) >> 1)
        torch.le(distance, middle.view(torch.float32), out=kept).mul_(weights)
        enough = kept.sum(dim=-1, keepdim=True, dtype=torch.float64) >= goal
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle)
    return high.clamp_(min=0).view(torch.float32).neg()
