"""What a step gives of hidden states that nothing is drawn from."""

from __future__ import annotations

import numpy as np
import torch

from asyncinfer.models import Decoder
from asyncinfer.runner.input_batch import StepArrays
from asyncinfer.runner.pending_step import EagerResults
from asyncinfer.sampling import upload
from asyncinfer.scheduler import Step

__all__ = ["chunk_peaks", "pooled"]

#: Tokens of which the head's norm is computed at once.
_AT_ONCE = 256


def chunk_peaks(
    results: EagerResults, step: Step, arrays: StepArrays, hidden: torch.Tensor, *, every: bool
) -> torch.Tensor:
    """float32 `[chunks]`: the largest number in the hidden states of each row with tokens that
    nothing is drawn from. It tells whether these are finite, as KV and states that other requests
    will find must be. Notes the rows in `results`.

    Args:
        hidden: `[tokens, hidden]` of the step's query tokens.
        every: look at all of a row's tokens. Attention to all tokens carries NaN and inf to the
            last one, so that only layers with a window or a state need it.
    """
    draws, counts = np.array(step.samples), np.array(step.counts)
    rows = np.flatnonzero(counts > draws if every else draws == 0)
    results.chunks = rows.tolist()
    first, counts = arrays.first_tokens[rows], (counts - draws)[rows]
    if every:
        spans = zip(first.tolist(), counts.tolist(), strict=True)
        return torch.stack([hidden[at : at + n].abs().amax() for at, n in spans]).float()
    states = hidden.index_select(0, *upload(hidden.device, first + counts - 1))
    return states.abs().amax(dim=-1).float()


def pooled(decoder: Decoder, hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    """float32 `[hidden]` of a prompt's hidden states `[tokens, hidden]`: the last one's where
    `pooling` is "last", and otherwise their sum."""
    if pooling == "last":
        return decoder.normed(hidden[-1:])[0].float()
    total = torch.zeros(hidden.shape[1], device=hidden.device, dtype=torch.float32)
    for first in range(0, len(hidden), _AT_ONCE):
        total += decoder.normed(hidden[first : first + _AT_ONCE]).float().sum(dim=0)
    return total
