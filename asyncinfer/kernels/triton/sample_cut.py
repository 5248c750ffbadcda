"""The cut of top-k and of top-p, found by search: no sort."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["find_cut"]


@triton.jit
def find_cut(
    logits,
    peak,
    temperature,
    limit,
    goal,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """Bits of the largest distance from `peak` that is kept, of a row of `logits`.

    That is the smallest distance within which lie `goal` tokens, or with `BY_MASS` the share `goal`
    of the weights `exp(-distance / temperature)` of all tokens within `limit` (bits, too); and
    whatever is as far once it is divided by `temperature`. Each turn reads the row once, and takes
    of the interval that holds the answer one of four parts, shrunk to where tokens are.
    """
    slope = tl.div_rn(-1.4426950408889634 + tl.zeros_like(temperature), temperature)
    # Within `low` lie too few tokens, within `high` enough; -1 is less than any distance.
    low, high = tl.full((), -1, tl.int32), limit
    if BY_MASS:
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            bits, weights = _turn(logits, start, peak, slope, VOCAB, BLOCK, BY_MASS)
            sums += tl.where(bits <= limit, weights, 0.0)
        goal = tl.sum(sums, axis=0) * goal
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        in_first, in_second = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        in_third = tl.zeros((BLOCK,), tl.float32)
        nearest, farthest = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32), tl.full((BLOCK,), -1, tl.int32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            bits, weights = _turn(logits, start, peak, slope, VOCAB, BLOCK, BY_MASS)
            in_first += tl.where(bits <= first, weights, 0.0)
            in_second += tl.where(bits <= second, weights, 0.0)
            in_third += tl.where(bits <= third, weights, 0.0)
            nearest = tl.minimum(nearest, tl.where(bits > low, bits, 0x7FFFFFFF))
            farthest = tl.maximum(farthest, tl.where(bits <= high, bits, -1))
        after = tl.min(nearest, axis=0) - 1
        high = tl.minimum(high, tl.max(farthest, axis=0))
        if tl.sum(in_first, axis=0) >= goal:
            high = tl.minimum(high, first)
        elif tl.sum(in_second, axis=0) >= goal:
            low, high = first, tl.minimum(high, second)
        elif tl.sum(in_third, axis=0) >= goal:
            low, high = second, tl.minimum(high, third)
        else:
            low = third
        low = tl.maximum(low, after)
    # Division can make up to three neighbouring distances equal.
    scaled = tl.div_rn(high.to(tl.float32, bitcast=True), temperature)
    for _ in tl.static_range(3):
        beyond = (high + 1).to(tl.float32, bitcast=True)
        high = tl.where(tl.div_rn(beyond, temperature) == scaled, high + 1, high)
    return high


@triton.jit
def _turn(
    logits, start, peak, slope, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BY_MASS: tl.constexpr
):
    """Bits of a block's distances from `peak`, and the weight of each token in the sum."""
    columns = start + tl.arange(0, BLOCK)
    inside = columns < VOCAB
    values = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32)
    below = peak - values
    bits = tl.where(inside, below.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    if BY_MASS:
        return bits, tl.exp2(below * slope)
    else:
        return bits, tl.full((BLOCK,), 1.0, tl.float32)
