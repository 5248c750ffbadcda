"""Recorded calls of a step on a CPU, and what they leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.kernels.native import RecordedCalls
from asyncinfer.sampling import Sampled

__all__ = ["RecordedHead", "RecordedLayers", "StepKind", "same_bits"]


class StepKind(NamedTuple):
    """What steps that share a recording have in common."""

    #: Rows of one query token.
    rows: int
    #: Whether a chunk of a prompt comes after them.
    chunk: bool = False


@dataclass(frozen=True, slots=True)
class RecordedHead:
    """Results of the rows of a step that decode. The next step writes to the same memory."""

    #: `[rows, vocab]` in the model's dtype.
    logits: torch.Tensor
    #: Each row's largest, float32, and its token, int64; None where native code does not find them.
    largest: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]] | None

    @property
    def greedy(self) -> Sampled | None:
        """Each row's likeliest token, in memory of its own."""
        if self.largest is None:
            return None
        values, tokens = (torch.from_numpy(each.copy()) for each in self.largest)
        return Sampled(tokens, values)

    def equals(self, logits: torch.Tensor, vocab_size: int) -> bool:
        """Whether these are the bits of `logits`, and the largest of the first `vocab_size`. Of a
        row with NaN any token may be the largest."""
        if not same_bits(self.logits, logits):
            return False
        if self.largest is None:
            return True
        values, tokens = self.largest
        largest, places = logits[:, :vocab_size].float().max(dim=-1)
        known = ~largest.isnan().numpy()
        return np.array_equal(values, largest.numpy(), equal_nan=True) and np.array_equal(
            tokens[known], places.numpy()[known]
        )


class RecordedLayers(NamedTuple):
    """The recorded calls of a step."""

    calls: RecordedCalls
    #: The hidden states that the calls leave, with room for those of the longest chunk.
    hidden: torch.Tensor
    #: None where the head is not recorded.
    head: RecordedHead | None
    #: Tokens of the recorded step, and the most of one that may be replayed.
    tokens: int
    most_tokens: float


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of float32 or bfloat16 have the same bits."""
    bits = torch.int32 if one.dtype is torch.float32 else torch.int16
    return torch.equal(one.view(bits), other.contiguous().view(bits))
