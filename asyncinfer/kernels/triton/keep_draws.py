"""Writes the drawn tokens of a recorded step, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.launched import launched

__all__ = ["keep_draws"]


def keep_draws(
    tokens: torch.Tensor,
    peaks: torch.Tensor,
    places: torch.Tensor,
    history: torch.Tensor,
    results: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """As the reference kernel."""
    count = tokens.shape[0]
    _keep_draws[(1,)](
        tokens,
        peaks,
        places,
        history,
        results,
        turn,
        count,
        IN_FLIGHT=results.shape[0],
        ROWS=results.shape[2],
        BLOCK=triton.next_power_of_2(results.shape[2]),
        num_warps=1,
    )


@launched(
    do_not_specialize=("count",), do_not_specialize_on_alignment=("tokens", "peaks", "places")
)
def _keep_draws(
    tokens,
    peaks,
    places,
    history,
    results,
    turn,
    count,
    IN_FLIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program does it all, so that no other program reads `turn` after its increment."""
    now = tl.load(turn)
    row = tl.arange(0, BLOCK)
    there = row < count
    drawn = tl.load(tokens + row, mask=there, other=0).to(tl.int32)
    tl.store(history + tl.load(places + row, mask=there, other=0), drawn, mask=there)
    target = results + now * (2 * ROWS) + row
    tl.store(target, drawn, mask=there)
    peak = tl.load(peaks + row, mask=there, other=0.0)
    tl.store(target + ROWS, peak.to(tl.int32, bitcast=True), mask=there)
    tl.store(turn, (now + 1) % IN_FLIGHT)
