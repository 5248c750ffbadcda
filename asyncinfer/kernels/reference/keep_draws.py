"""Writes the drawn tokens of a recorded step."""

from __future__ import annotations

import torch

__all__ = ["keep_draws"]


def keep_draws(
    tokens: torch.Tensor,
    peaks: torch.Tensor,
    places: torch.Tensor,
    history: torch.Tensor,
    results: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """Write `tokens` int64 `[n]` to `places` int64 `[n]` of the flat `history` int32, and to the
    first columns of `results[turn]` with the bits of `peaks` float32 `[n]`.

    `results` is int32 `[in_flight, 2, rows]`, with `rows` at least n. `turn` int64 `[1]` is
    incremented modulo `in_flight`. Of equal places any one keeps its token.
    """
    drawn = tokens.int()
    history.view(-1).index_copy_(0, places, drawn)
    both = torch.stack((drawn, peaks.view(torch.int32)))
    results[:, :, : len(tokens)].index_copy_(0, turn, both[None])
    turn.add_(1).remainder_(len(results))
