"""Where a recorded step leaves what it has drawn."""

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
    """`tokens` int64 `[n]` go to `places` int64 `[n]` of `history` int32, flat; they and the bits
    of `peaks` float32 `[n]` to the first columns of `results[turn]`.

    `results` int32 `[in_flight, 2, rows]`, `rows` at least n. `turn` int64 `[1]` is put on by one,
    and begins anew after the last. Of places that are equal any token stays.
    """
    drawn = tokens.int()
    history.view(-1).index_copy_(0, places, drawn)
    both = torch.stack((drawn, peaks.view(torch.int32)))
    results[:, :, : len(tokens)].index_copy_(0, turn, both[None])
    turn.add_(1).remainder_(len(results))
