"""One token per row: temperature, top-k, top-p, min-p, and a draw that depends on its keys only.

The draw is Gumbel-max by exponential variables, called the race (`kernels/noise.py`). Many programs
read a row, each a part of it: once for the row's largest logit and its sum of exponentials, once
for the race. Between the two, rows with top-k or top-p search for their cut (`sample_cut.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.launched import launched
from asyncinfer.kernels.triton.race import race, race_keys
from asyncinfer.kernels.triton.sample_cut import PART, cut_state, find_cuts
from asyncinfer.kernels.triton.sample_tally import STATE, row_peak

__all__ = ["sample"]

_NEVER = tl.constexpr(-80.0)


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference kernel, up to rounding. Weights and their sums are float32. So a token
    within about 1e-6 of top-p's mass may be kept or cut differently. Of two tokens whose quotients
    in the race are that close, the other may win. Top-k and ties are exact."""
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    peak, logprobs = torch.empty((2, rows), dtype=torch.float32, device=device)
    if not rows:
        return tokens, peak, logprobs
    if logits.storage_offset() * logits.itemsize % 16:
        # How a row is divided among threads depends on its alignment. The division decides the
        # order of sums, which must be the same in every batch.
        logits = logits.clone()
    splits = triton.cdiv(vocab, PART)
    # For each part of each row: its largest logit, its sum of exponentials, and the least quotient
    # of the race. `places` holds the tokens of the first and the last of these.
    figures = torch.empty((3, rows, splits), dtype=torch.float32, device=device)
    places = torch.empty((2, rows, splits), dtype=torch.int32, device=device)
    shape = {
        "STRIDE": logits.stride(0),
        "VOCAB": vocab,
        "SPLITS": splits,
        "PARTS": triton.next_power_of_2(splits),
    }
    grid = (rows, splits)
    truncates = top_k is not None or top_p is not None
    state = cut_state(rows, vocab, device) if truncates else None
    _survey[grid](logits, figures, places, state, rows, **shape, BLOCK=PART, num_warps=4)
    if temperature is not None:
        cuts = None
        if truncates:
            cuts = find_cuts(logits, figures, temperature, top_k, top_p, state)
        _draw[grid](
            logits,
            figures,
            places,
            seeds,
            positions,
            temperature,
            cuts,
            min_p,
            rows,
            **shape,
            BLOCK=PART,
            num_warps=8,
        )
    _settle[(rows,)](
        logits, figures, places, temperature, tokens, peak, logprobs, rows, **shape, num_warps=1
    )
    return tokens, peak, logprobs


@launched(do_not_specialize=("rows",))
def _survey(
    logits,
    figures,
    places,
    state,
    rows,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the largest logit of a part of a row, its token, and the part's sum of exponentials."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = split * BLOCK + tl.arange(0, BLOCK)
    inside = columns < VOCAB
    values = tl.load(logits + row * STRIDE + columns, mask=inside, other=float("-inf"))
    values = values.to(tl.float32)
    spoilt = tl.max((values != values).to(tl.int32), axis=0) > 0
    best, at = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    base = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp(values - base), axis=0)
    part = row * SPLITS + split
    tl.store(figures + part, tl.where(spoilt, float("nan"), best))
    tl.store(figures + rows.to(tl.int64) * SPLITS + part, total)
    tl.store(places + part, split * BLOCK + at)
    if state is not None:  # noqa: SIM102 (else there is nothing to write to)
        if split == 0:
            tl.store(state + row * STATE, 0)


@launched(
    do_not_specialize=("rows",),
    do_not_specialize_on_alignment=("seeds", "positions", "temperatures", "cuts", "min_p"),
)
def _draw(
    logits,
    figures,
    places,
    seeds,
    positions,
    temperatures,
    cuts,
    min_p,
    rows,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the token that wins the race in a part of a row, and its quotient."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        _, peak = row_peak(figures, row, SPLITS, PARTS)
        columns = split * BLOCK + tl.arange(0, BLOCK)
        inside = columns < VOCAB
        values = tl.load(logits + row * STRIDE + columns, mask=inside, other=float("-inf"))
        below = peak - values.to(tl.float32)
        scores = -tl.div_rn(below, temperature + tl.zeros_like(below))
        kept = inside
        if cuts is not None:
            kept = kept & (below <= tl.load(cuts + row))
        if min_p is not None:
            kept = kept & (scores >= tl.log(tl.load(min_p + row)))
        weights = tl.exp(tl.maximum(scores, _NEVER))
        low, high = race_keys(tl.load(seeds + row), tl.load(positions + row))
        # A token that was cut gets 0. It loses, since the quotients of all others are below 0.
        arrival = tl.where(kept, tl.div_rn(weights, race(columns, low, high)), 0.0)
        arrival = tl.where(inside, arrival, 1.0)
        best, at = tl.min(arrival, axis=0, return_indices=True, return_indices_tie_break_left=True)
        part = row * SPLITS + split
        tl.store(figures + 2 * rows.to(tl.int64) * SPLITS + part, best)
        tl.store(places + rows.to(tl.int64) * SPLITS + part, split * BLOCK + at)


@launched(
    do_not_specialize=("rows",),
    do_not_specialize_on_alignment=("temperatures", "tokens", "peaks", "logprobs"),
)
def _settle(
    logits,
    figures,
    places,
    temperatures,
    tokens,
    peaks,
    logprobs,
    rows,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Join the parts of a row, and write its token, its largest logit and the token's logprob."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    there = parts < SPLITS
    best, peak = row_peak(figures, row, SPLITS, PARTS)
    base = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    every = rows.to(tl.int64) * SPLITS
    totals = tl.load(figures + every + row * SPLITS + parts, mask=there, other=0.0)
    total = tl.sum(tl.where(totals > 0.0, totals * tl.exp(best - base), 0.0), axis=0)
    # A greedy row takes the token of its largest logit, any other row the token that won the race.
    _, part = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
    chosen = row * SPLITS + part
    if temperatures is not None:  # noqa: SIM102 (else there is nothing to load from)
        if tl.load(temperatures + row) > 0.0:
            arrival = tl.load(figures + 2 * every + row * SPLITS + parts, mask=there, other=2.0)
            _, part = tl.min(
                arrival, axis=0, return_indices=True, return_indices_tie_break_left=True
            )
            chosen = every + row * SPLITS + part
    # The token is arbitrary where logits are not finite, but must be one of the vocabulary.
    token = tl.minimum(tl.maximum(tl.load(places + chosen), 0), VOCAB - 1)
    logit = tl.load(logits + row * STRIDE + token).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(peaks + row, peak)
    tl.store(logprobs + row, logit - base - tl.log(total))
