"""Classifier-free guidance (Ho and Salimans, 2022; for text, Sanchez et al., 2023)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.transfer import upload

__all__ = ["guide"]

I64 = npt.NDArray[np.int64]


def guide(logits: torch.Tensor, rows: I64, guides: I64, scales: npt.ArrayLike) -> None:
    """Replace the logits of guided rows by `free + scale * (given - free)`, where `given` are the
    logprobs of the row and `free` those of its guide.

    Args:
        logits: float32 `[n, vocab]`, changed in place.
        rows, guides: int64 `[pairs]`: the row that is drawn from and the one beside it.
        scales: `[pairs]`; 1 would leave the row's logprobs as they are.
    """
    at, beside, by = upload(logits.device, rows, guides, np.asarray(scales, np.float32)[:, None])
    given = torch.log_softmax(logits.index_select(0, at), dim=-1)
    free = torch.log_softmax(logits.index_select(0, beside), dim=-1)
    logits.index_copy_(0, at, free + by * (given - free))
