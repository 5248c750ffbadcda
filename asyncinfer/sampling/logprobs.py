"""Logprobs of chosen tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncinfer.scheduler.plan import RowLogprobs

__all__ = ["row_logprobs", "score_tokens"]


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> list[torch.Tensor]:
    """Logprob and rank of one token per row, and the `top` most likely ones.

    Args:
        logits: float32 `[n, vocab]`, as the model gave them.
        tokens: int64 `[n]`.

    Returns:
        Tokens int64 `[n]`, logprobs float32 `[n]`, ranks int64 `[n]` (one more than the number
        of tokens that are strictly likelier), alternatives' ids int64 and logprobs float32, both
        `[n, min(top, vocab)]`.
    """
    chosen = logits.gather(1, tokens[:, None])
    total = logits.logsumexp(dim=-1)
    ranks = (logits > chosen).sum(dim=-1).add_(1)
    best = logits.topk(min(top, logits.shape[1]), dim=-1)
    return [tokens, chosen[:, 0] - total, ranks, best.indices, best.values - total[:, None]]


def row_logprobs(scored: Sequence[list[Any]], start: int, stop: int, top: int) -> RowLogprobs:
    """Entries `start .. stop - 1` of `score_tokens`' answer, as lists, with `top` alternatives
    each; the lowest id comes first among equals."""
    tokens, logprobs, ranks, ids, values = (part[start:stop] for part in scored)
    return RowLogprobs(
        token_ids=tokens,
        logprobs=logprobs,
        ranks=ranks,
        top=[
            tuple(sorted(zip(i[:top], v[:top], strict=True), key=lambda pair: (-pair[1], pair[0])))
            for i, v in zip(ids, values, strict=True)
        ],
    )
