"""Sampling and scoring one row at a time, for deterministic engines: the last bit of what an
operator computes for a row may depend on how many rows it is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.logprobs import score_tokens
from asyncinfer.sampling.state import Sampled, SamplingState

__all__ = ["join_scores", "sample_per_row", "score_per_row"]

I64 = npt.NDArray[np.int64]


def sample_per_row(
    state: SamplingState, logits: torch.Tensor, slots: I64, positions: I64
) -> Sampled:
    """`SamplingState.sample`, row by row; a plugin too is called with one row at a time."""
    rows = [
        state.sample(_alone(logits, row), slots[row : row + 1], positions[row : row + 1])
        for row in range(len(logits))
    ]
    whole = Sampled(torch.cat([one.tokens for one in rows]), torch.cat([one.peak for one in rows]))
    for row, sampled in enumerate(rows):
        whole.scored_rows.update((row, top) for top in sampled.scored_rows.values())
        for call in sampled.calls:
            call.rows = call.rows + row
            whole.calls.append(call)
    whole.scores = join_scores([one.scores for one in rows if one.scores])
    return whole


def score_per_row(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> list[torch.Tensor]:
    """`score_tokens`, row by row."""
    if not len(logits):
        return score_tokens(logits, tokens, top)
    return join_scores(
        [
            score_tokens(_alone(logits, row), tokens[row : row + 1], top)
            for row in range(len(logits))
        ]
    )


def join_scores(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Concatenate results of `score_tokens`, padded to the largest number of alternatives."""
    return [_join(column) for column in zip(*parts, strict=True)]


def _join(column: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = list(column)
    if parts[0].ndim == 2:
        width = max(part.shape[1] for part in parts)
        parts = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
    return torch.cat(parts)


def _alone(logits: torch.Tensor, row: int) -> torch.Tensor:
    """One row in memory of its own, since an operator may choose its path by alignment."""
    return logits[row : row + 1].clone(memory_format=torch.contiguous_format)
