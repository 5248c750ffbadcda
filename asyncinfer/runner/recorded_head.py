"""`RecordedHead`: what recorded calls of a model's head leave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling import Sampled

__all__ = ["RecordedHead", "same_bits"]


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


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of float32 or bfloat16 have the same bits."""
    bits = torch.int32 if one.dtype is torch.float32 else torch.int16
    return torch.equal(one.view(bits), other.contiguous().view(bits))
