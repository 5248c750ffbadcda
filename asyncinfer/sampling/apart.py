"""Rows sampled and scored one by one: what an operator makes of a row may depend, in its last bit,
on how many there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.logprobs import score_tokens
from asyncinfer.sampling.state import Sampled, SamplingState

__all__ = ["join_scores", "sample_apart", "score_apart"]

I64 = npt.NDArray[np.int64]


def sample_apart(state: SamplingState, logits: torch.Tensor, slots: I64, positions: I64) -> Sampled:
    """As `SamplingState.sample`. A plugin gets its rows one at a time, too."""
    rows = [
        state.sample(_alone(logits, row), slots[row : row + 1], positions[row : row + 1])
        for row in range(len(logits))
    ]
    whole = Sampled(torch.cat([its.tokens for its in rows]), torch.cat([its.peak for its in rows]))
    for row, its in enumerate(rows):
        whole.scored_rows.update((row, top) for top in its.scored_rows.values())
        for call in its.calls:
            call.rows = call.rows + row
            whole.calls.append(call)
    whole.scores = join_scores([its.scores for its in rows if its.scores])
    return whole


def score_apart(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> list[torch.Tensor]:
    """As `score_tokens`."""
    if not len(logits):
        return score_tokens(logits, tokens, top)
    return join_scores(
        [
            score_tokens(_alone(logits, row), tokens[row : row + 1], top)
            for row in range(len(logits))
        ]
    )


def join_scores(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Answers of `score_tokens` one after the other, filled up to the most alternatives."""
    return [_join(column) for column in zip(*parts, strict=True)]


def _join(column: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = list(column)
    if parts[0].ndim == 2:
        width = max(its.shape[1] for its in parts)
        parts = [torch.nn.functional.pad(its, (0, width - its.shape[1])) for its in parts]
    return torch.cat(parts)


def _alone(logits: torch.Tensor, row: int) -> torch.Tensor:
    """In memory of its own: where it lies may count, too."""
    return logits[row : row + 1].clone(memory_format=torch.contiguous_format)
