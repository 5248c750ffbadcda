"""Logprobs of chosen tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.scheduler.row_logprobs import FIXED_WORDS, RowLogprobs

__all__ = ["pack_scores", "row_logprobs", "score_given", "score_processed", "score_tokens"]


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> list[torch.Tensor]:
    """Logprob and rank of one token per row, and the `top` most likely ones.

    Args:
        logits: float32 `[n, vocab]`, as the model gave them.
        tokens: int64 `[n]`.

    Returns:
        Tokens int64 `[n]`, logprobs float32 `[n]`, ranks int64 `[n]` (1 + the number of strictly
        likelier tokens), alternatives' ids int64 and logprobs float32, both
        `[n, min(top, vocab)]`.
    """
    chosen = logits.gather(1, tokens[:, None])
    total = logits.logsumexp(dim=-1)
    ranks = (logits > chosen).sum(dim=-1).add_(1)
    best = logits.topk(min(top, logits.shape[1]), dim=-1)
    return [tokens, chosen[:, 0] - total, ranks, best.indices, best.values - total[:, None]]


def score_given(
    scores: Sequence[torch.Tensor], row: int, logits: torch.Tensor, ids: torch.Tensor
) -> None:
    """Make these tokens the alternatives of one row of what `score_tokens` gave, the best first.

    Args:
        logits: float32 `[vocab]`, the row's own.
        ids: int64 `[k]`, of no more tokens than there are alternatives.
    """
    values, order = (logits[ids] - logits.logsumexp(dim=-1)).sort(descending=True, stable=True)
    scores[3][row, : len(ids)] = ids[order]
    scores[4][row, : len(ids)] = values


def score_processed(
    scores: Sequence[torch.Tensor], row: int, logits: torch.Tensor, processed: torch.Tensor
) -> None:
    """Make the likeliest tokens after biases and bars the alternatives of one row of what
    `score_tokens` gave. What was added to a logit is added to its logprob, as transformers does.

    Args:
        logits, processed: float32 `[vocab]`, the row's own.
    """
    best = processed.topk(scores[3].shape[1])
    scores[3][row] = best.indices
    scores[4][row] = best.values - logits.logsumexp(dim=-1)


def pack_scores(scored: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int32]:
    """What `score_tokens` gave, on the host, as the records of `RowLogprobs`: int32
    `[n, 3 + 2 * alternatives]`."""
    tokens, logprobs, ranks, ids, values = scored
    top = ids.shape[1]
    words = np.empty((len(tokens), FIXED_WORDS + 2 * top), np.int32)
    floats = words.view(np.float32)
    words[:, 0], floats[:, 1], words[:, 2] = tokens, logprobs, ranks
    words[:, FIXED_WORDS : FIXED_WORDS + top] = ids
    floats[:, FIXED_WORDS + top :] = values
    return words


def row_logprobs(words: npt.NDArray[np.int32], start: int, stop: int, top: int) -> RowLogprobs:
    """Records `start .. stop - 1`, with at most `top` alternatives each."""
    most = (words.shape[1] - FIXED_WORDS) // 2
    records, top = words[start:stop], min(top, most)
    if top < most:
        ids, values = records[:, : FIXED_WORDS + top], records[:, FIXED_WORDS + most :]
        records = np.concatenate([ids, values[:, :top]], axis=1)
    return RowLogprobs(records.tobytes(), top)
