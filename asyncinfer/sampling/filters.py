"""Truncation: top-k, top-p, min-p and typical, each on what the one before it left.

Every filter is a threshold: it keeps the tokens at least as good as its last one, and with it
all that tie with it. So what is kept does not hang on the order a sort gives to equals, and
never is it empty. A token that is cut gets the weight 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.transfer import upload

__all__ = ["keep_likely", "keep_typical"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

#: Candidates that are sorted first when a mass has to be reached; then 16 times as many.
_CANDIDATES = 256


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
    # With surprisal = log(total) - score, the entropy is its mean.
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
    order: torch.Tensor, weight: torch.Tensor, share: torch.Tensor, head: torch.Tensor | None
) -> torch.Tensor:
    """`[n, 1]`: the entry of `order` at which the weights, best order first, sum to `share` of
    their total.

    `head`, int64 `[n, k]`, names the best in order where they are known already; it holds all
    that weigh anything, but for ties with its last. Sums are float64: they must not depend on
    how a device splits a row.
    """
    goal = weight.sum(dim=-1, keepdim=True, dtype=torch.float64).mul_(share)
    if head is not None:
        return _cross(order.gather(1, head), weight.gather(1, head), goal)[0]
    if order.device.type != "cpu":
        # To ask whether the first candidates are enough would wait for the device.
        return _search(order, weight, goal, order.shape[1])
    return _search(order, weight, goal, _CANDIDATES)


def _search(
    order: torch.Tensor, weight: torch.Tensor, goal: torch.Tensor, size: int
) -> torch.Tensor:
    """`_crossing` by sorting the `size` best of each row, and more where they are too few."""
    vocab = order.shape[1]
    best = order.topk(min(size, vocab), dim=-1)
    cut, reached = _cross(best.values, weight.gather(1, best.indices), goal)
    if size < vocab and not bool(reached.all()):
        rows = (~reached).nonzero()[:, 0]
        cut[rows] = _search(order[rows], weight[rows], goal[rows], size * 16)
    return cut


def _cross(
    order: torch.Tensor, weight: torch.Tensor, goal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entry of the sorted `order` where `goal` is met (else its last), and whether it is."""
    mass = weight.cumsum(dim=-1, dtype=torch.float64)
    before = (mass < goal).sum(dim=-1, keepdim=True)
    return order.gather(1, before.clamp_(max=order.shape[1] - 1)), mass[:, -1] >= goal[:, 0]
