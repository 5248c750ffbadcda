"""How many tokens of a row, and how much of their weight, are within eight distances of its largest
logit. Many programs count, and the last one to end narrows the interval that holds the cut."""

from __future__ import annotations

import triton
import triton.language as tl

from asyncinfer.kernels.triton.launched import launched
from asyncinfer.kernels.triton.sample_search import ALL, closed, distances_of, slope_of

__all__ = ["DISTANCES", "STATE", "asked_of", "row_peak", "tally"]

#: How many distances are counted at. The first is the lower end of the interval that is divided,
#: and the last its upper end.
DISTANCES = tl.constexpr(8)
#: int32 words of a row's state:
#: 0: programs that have arrived.
#: 1, 2: the interval's lower and upper end, as bits.
#: 3, 4: the numbers of both ends among the distances.
#: 5: tokens in the interval.
#: 6, 7: as float32, the tokens or the weight below the interval, and the weight of the whole row.
STATE = tl.constexpr(8)


@triton.jit
def row_peak(figures, row, SPLITS: tl.constexpr, PARTS: tl.constexpr):
    """The largest logits of a row's parts `[PARTS]`, and the row's, NaN if any logit is."""
    parts = tl.arange(0, PARTS)
    best = tl.load(figures + row * SPLITS + parts, mask=parts < SPLITS, other=float("-inf"))
    spoilt = tl.max((best != best).to(tl.int32), axis=0) > 0
    return best, tl.where(spoilt, float("nan"), tl.max(best, axis=0))


@triton.jit
def asked_of(temperature, peak, top_k, top_p, row, VOCAB: tl.constexpr):
    """What a row asks for: how many tokens top-k keeps, which share of their weight top-p keeps,
    and whether the row has a cut at all.

    The count is 0 where top-k keeps all, and the share 1 where top-p does. A greedy row needs no
    cut, and a row whose largest logit is not finite has none.
    """
    count, share = tl.full((), 0, tl.int32), tl.full((), 1.0, tl.float32)
    if top_k is not None:
        count = tl.load(top_k + row)
        count = tl.where(count < VOCAB, tl.maximum(count, 0), 0)
    if top_p is not None:
        share = tl.load(top_p + row)
    finite = tl.abs(peak) < float("inf")
    return count, share, (temperature > 0.0) & finite & ((count > 0) | (share < 1.0))


@launched(do_not_specialize_on_alignment=("temperatures", "top_k", "top_p"))
def tally(
    logits,
    figures,
    temperatures,
    top_k,
    top_p,
    state,
    counts,
    masses,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count a part of a row. The last program of a row writes to `state` which interval holds the
    row's cut.

    `counts` int32 and `masses` float32 are `[rows, DISTANCES, SPLITS]`. With `FIRST` the interval
    is the whole row. Else the interval in `state` is divided again where it holds more than
    `CANDIDATES` tokens.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    best, peak = row_peak(figures, row, SPLITS, PARTS)
    count, share, cut = asked_of(temperature, peak, top_k, top_p, row, VOCAB)
    if cut == 0:
        return
    own = state + row * STATE
    if FIRST:
        low, high = tl.full((), -1, tl.int32), tl.full((), ALL, tl.int32)
        unit = _unit(best, peak, temperature, count)
    else:
        # A row that asks for top-k and top-p needs all tokens that top-k keeps, so its interval
        # begins at the largest logit and cannot be narrowed from below.
        if (tl.load(own + 5) <= CANDIDATES) | ((count > 0) & (share < 1.0)):
            return
        low, high, unit = tl.load(own + 1), tl.load(own + 2), temperature

    columns = split * BLOCK + tl.arange(0, BLOCK)
    inside = columns < VOCAB
    values = tl.load(logits + row * STRIDE + columns, mask=inside, other=float("-inf"))
    below, bits = distances_of(values, peak, inside)
    weights = tl.exp2(below * slope_of(temperature))
    part = row * (DISTANCES * SPLITS) + split
    for number in tl.static_range(DISTANCES):
        each = _distance(tl.full((), number, tl.int32), low, high, unit, temperature, count, FIRST)
        within = bits <= each
        tl.store(counts + part + number * SPLITS, tl.sum(within.to(tl.int32), axis=0))
        tl.store(masses + part + number * SPLITS, tl.sum(tl.where(within, weights, 0.0), axis=0))
    # All threads write their parts before one of them counts the program as arrived.
    tl.debug_barrier()
    if tl.atomic_add(own, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
        return

    tl.store(own, 0)
    numbers, parts = tl.arange(0, DISTANCES), tl.arange(0, PARTS)
    at = row * (DISTANCES * SPLITS) + numbers[:, None] * SPLITS + parts[None, :]
    there = (parts < SPLITS)[None, :]
    # ".cg" bypasses the L1 cache, which does not see writes of other multiprocessors.
    tokens = tl.sum(tl.load(counts + at, mask=there, other=0, cache_modifier=".cg"), axis=1)
    mass = tl.sum(tl.load(masses + at, mask=there, other=0.0, cache_modifier=".cg"), axis=1)
    if FIRST:
        total = tl.sum(tl.where(numbers == DISTANCES - 1, mass, 0.0), axis=0)
    else:
        total = tl.load(own + 7).to(tl.float32, bitcast=True)
    enough = tl.where(
        count > 0, (tokens >= count).to(tl.int32), (mass >= total * share).to(tl.int32)
    )
    last = tl.min(tl.where(enough > 0, numbers, DISTANCES - 1), axis=0)
    last = tl.maximum(last, 1)
    first = tl.where((count > 0) & (share < 1.0), 0, last - 1)
    ends = _distance(numbers, low, high, unit, temperature, count, FIRST)
    before = tl.sum(tl.where(numbers == first, tokens, 0), axis=0)
    lower = tl.sum(tl.where(numbers == first, mass, 0.0), axis=0)
    lower = tl.where(count > 0, before.to(tl.float32), lower)
    tl.store(own + 1, tl.sum(tl.where(numbers == first, ends, 0), axis=0))
    tl.store(own + 2, tl.sum(tl.where(numbers == last, ends, 0), axis=0))
    tl.store(own + 3, first)
    tl.store(own + 4, last)
    tl.store(own + 5, tl.sum(tl.where(numbers == last, tokens, 0), axis=0) - before)
    tl.store(own + 6, lower.to(tl.int32, bitcast=True))
    tl.store(own + 7, total.to(tl.int32, bitcast=True))


@triton.jit
def _unit(best, peak, temperature, count):
    """The unit of the first distances. Top-p's is the temperature. Top-k's is the mean distance of
    the parts' largest logits: about half as many tokens as there are parts are within it."""
    finite = best > float("-inf")
    total = tl.sum(tl.where(finite, peak - best, 0.0), axis=0)
    return tl.where(count > 0, total / tl.sum(finite.to(tl.float32), axis=0), temperature)


@triton.jit
def _distance(number, low, high, unit, temperature, count, FIRST: tl.constexpr):
    """The bits of the distances with these numbers, from 0 to `DISTANCES - 1`."""
    step = number.to(tl.float32)
    if FIRST:
        between = unit * tl.where(count > 0, 0.4 + 0.2 * step, 2.0 * step)
    else:
        near = tl.maximum(low, 0).to(tl.float32, bitcast=True)
        far = high.to(tl.float32, bitcast=True)
        # An interval without an upper end cannot be divided evenly, so distances grow.
        bounded = near + (far - near) * (step * (1.0 / 7.0))
        between = tl.where(high == ALL, near * (1.0 + step), bounded)
    bits = closed(between.to(tl.int32, bitcast=True), temperature)
    # Rounding must not put a distance outside the interval.
    bits = tl.minimum(tl.maximum(bits, low), high)
    return tl.where(number == 0, low, tl.where(number == DISTANCES - 1, high, bits))
