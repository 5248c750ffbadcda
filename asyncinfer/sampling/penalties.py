"""Penalties on tokens that occurred: repetition, presence, frequency.

Only the logits of tokens that occurred are gathered, changed and put back, so the cost grows with
the length of the text and not with the vocabulary. A token that occurs twice is put back twice with
the same value.
"""

from __future__ import annotations

import torch

__all__ = ["Occurrences", "penalise_repetition"]


def penalise_repetition(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, penalty: torch.Tensor
) -> None:
    """Divide positive and multiply negative logits by `penalty` (CTRL, Keskar et al. 2019).

    Args:
        logits: float32 `[n, vocab]`, changed in place.
        rows: int64 `[m]`, which rows of `logits`.
        tokens: int64 `[m, length]`: the tokens of prompt and answer, padded with any of them.
        penalty: float32 `[m]`.
    """
    at = rows[:, None]
    found = logits[at, tokens]
    penalty = penalty[:, None]
    logits[at, tokens] = torch.where(found > 0, found / penalty, found * penalty)


class Occurrences:
    """Applies presence and frequency penalties, with a table of counts that it keeps for reuse."""

    def __init__(self) -> None:
        #: int32 `[rows, vocab]`, all zero between calls; None until the first.
        self._counts: torch.Tensor | None = None

    def penalise(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        valid: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> None:
        """Subtract `presence` once and `frequency` per occurrence.

        Args:
            logits: float32 `[n, vocab]`, changed in place.
            rows: int64 `[m]`, which rows of `logits`.
            tokens: int64 `[m, length]`: the tokens of the answer, padded with anything.
            valid: bool `[m, length]`: False at padding.
            presence, frequency: float32 `[m]`.
        """
        counts = self._table(len(rows), logits)
        counts.scatter_add_(1, tokens, valid.int())
        count = counts.gather(1, tokens)
        counts.scatter_(1, tokens, 0)
        at = rows[:, None]
        penalty = frequency[:, None] * count + presence[:, None] * (count > 0)
        logits[at, tokens] = logits[at, tokens] - penalty

    def _table(self, rows: int, logits: torch.Tensor) -> torch.Tensor:
        vocab = logits.shape[1]
        if self._counts is None or len(self._counts) < rows:
            self._counts = torch.zeros((rows, vocab), dtype=torch.int32, device=logits.device)
        return self._counts[:rows]
