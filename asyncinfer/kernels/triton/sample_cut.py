"""The cut of top-k and of top-p: how far below the largest logit a kept token may lie.

A token's distance is the difference between the row's largest logit and its own. Many programs read
a row. Up to three times they count the tokens within eight distances, which narrows the interval of
distances that holds the cut. Then they copy the tokens of the interval side by side. One program
searches the copy. Where the interval holds too many tokens, as where thousands tie, the program
searches the row itself within the interval.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.triton.launched import launched
from asyncinfer.kernels.triton.sample_search import ALL, distances_of, find_cut, mass_within
from asyncinfer.kernels.triton.sample_tally import DISTANCES, STATE, asked_of, row_peak, tally

__all__ = ["PART", "cut_state", "find_cuts"]

#: The most tokens of a row that are copied, and the tokens that a search reads at a time.
_CANDIDATES: Final = 8192
_TURN: Final = 4096
#: How many times an interval is divided by seven before it is searched.
_TALLIES: Final = 3
#: Tokens of a part of a row, which one program reads.
PART: Final = 2048


def cut_state(rows: int, vocab: int, device: torch.device) -> torch.Tensor | None:
    """int32 `[rows, STATE]`, by which the programs of a row pass on what they found. The first word
    of a row must be zero. None: the vocabulary is so small that one program searches it."""
    if vocab <= _CANDIDATES:
        return None
    return torch.empty((rows, STATE.value), dtype=torch.int32, device=device)


def find_cuts(
    logits: torch.Tensor,
    figures: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    state: torch.Tensor | None,
) -> torch.Tensor:
    """float32 `[rows]`: the largest distance that a row keeps, infinity where the row keeps all.

    `figures` float32 `[any, rows, parts]` begin with the largest logit of each part of each row.
    The other arguments are those of `sample`, and `cut_state`.
    """
    rows, vocab = logits.shape
    device = logits.device
    splits = triton.cdiv(vocab, PART)
    shape = {
        "STRIDE": logits.stride(0),
        "VOCAB": vocab,
        "SPLITS": splits,
        "PARTS": triton.next_power_of_2(splits),
        "CANDIDATES": _CANDIDATES,
    }
    asked = logits, figures, temperature, top_k, top_p
    cuts = torch.empty(rows, dtype=torch.float32, device=device)
    copies = None
    if state is not None:
        grid = rows, splits
        counts = torch.empty((rows, DISTANCES.value, splits), dtype=torch.int32, device=device)
        masses = torch.empty_like(counts, dtype=torch.float32)
        copies = torch.empty((rows, _CANDIDATES), dtype=logits.dtype, device=device)
        options = {"BLOCK": PART, "num_warps": 4}
        for turn in range(_TALLIES):
            tally[grid](*asked, state, counts, masses, **shape, FIRST=turn == 0, **options)
        _copy[grid](*asked, state, counts, copies, **shape, **options)
    turn = min(_TURN, triton.next_power_of_2(vocab))
    _cut[(rows,)](*asked, state, copies, cuts, **shape, BLOCK=turn, num_warps=8)
    return cuts


@launched(do_not_specialize_on_alignment=("temperatures", "top_k", "top_p"))
def _copy(
    logits,
    figures,
    temperatures,
    top_k,
    top_p,
    state,
    counts,
    copies,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the tokens of a row's interval side by side, in their order, if there is room."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, peak = row_peak(figures, row, SPLITS, PARTS)
    _, _, cut = asked_of(tl.load(temperatures + row), peak, top_k, top_p, row, VOCAB)
    if cut == 0:
        return
    own = state + row * STATE
    if tl.load(own + 5) > CANDIDATES:
        return
    parts = tl.arange(0, PARTS)
    there = parts < SPLITS
    first = counts + (row * DISTANCES + tl.load(own + 3)) * SPLITS + parts
    last = counts + (row * DISTANCES + tl.load(own + 4)) * SPLITS + parts
    found = tl.load(last, mask=there, other=0) - tl.load(first, mask=there, other=0)
    if tl.sum(tl.where(parts == split, found, 0), axis=0) == 0:
        return
    columns = split * BLOCK + tl.arange(0, BLOCK)
    inside = columns < VOCAB
    values = tl.load(logits + row * STRIDE + columns, mask=inside, other=float("-inf"))
    _, bits = distances_of(values, peak, inside)
    picked = (bits > tl.load(own + 1)) & (bits <= tl.load(own + 2))
    before = tl.sum(tl.where(parts < split, found, 0), axis=0)
    place = before + tl.cumsum(picked.to(tl.int32), axis=0) - 1
    tl.store(copies + row * CANDIDATES + place, values, mask=picked)


@launched(do_not_specialize_on_alignment=("temperatures", "top_k", "top_p", "cuts"))
def _cut(
    logits,
    figures,
    temperatures,
    top_k,
    top_p,
    state,
    copies,
    cuts,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Search a row's copy, or else the row, for the cut of top-k, and within it for top-p's."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    _, peak = row_peak(figures, row, SPLITS, PARTS)
    count, share, cut = asked_of(temperature, peak, top_k, top_p, row, VOCAB)
    limit = tl.full((), ALL, tl.int32)
    if cut:
        source = logits + row * STRIDE
        tokens, readable = VOCAB, VOCAB
        low, high = tl.full((), -1, tl.int32), limit
        # A copy lacks the tokens below the interval, whose number or weight is `below`.
        below, total = 0.0, 0.0
        if state is not None:
            own = state + row * STATE
            low, high = tl.load(own + 1), tl.load(own + 2)
            total = tl.load(own + 7).to(tl.float32, bitcast=True)
            inside = tl.load(own + 5)
            few = inside <= CANDIDATES
            source = tl.where(few, copies + row * CANDIDATES, source)
            tokens = tl.where(few, inside, VOCAB)
            readable = tl.where(few, CANDIDATES, VOCAB)
            below = tl.where(few, tl.load(own + 6).to(tl.float32, bitcast=True), 0.0)
        if top_k is not None:  # noqa: SIM102 (else the branch is not compiled)
            if count > 0:
                goal = count.to(tl.float32) - below
                limit = find_cut(
                    source, tokens, readable, peak, temperature, low, high, goal, BLOCK, False
                )
        if top_p is not None:  # noqa: SIM102
            if share < 1.0:
                if state is None or count > 0:
                    low, high = tl.full((), -1, tl.int32), limit
                    below = 0.0
                    total = mass_within(source, tokens, readable, peak, temperature, limit, BLOCK)
                goal = total * share - below
                limit = find_cut(
                    source, tokens, readable, peak, temperature, low, high, goal, BLOCK, True
                )
    tl.store(cuts + row, limit.to(tl.float32, bitcast=True))
