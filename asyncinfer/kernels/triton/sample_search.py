"""The cut of top-k and of top-p among a row's tokens, found by a search in place of a sort."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["ALL", "closed", "distances_of", "find_cut", "mass_within", "slope_of"]

#: The bits of infinity: those of positive floats are in the order of their values.
ALL = tl.constexpr(0x7F800000)
#: Bits that stand for no token. They are above those of every distance.
_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def find_cut(
    source,
    tokens,
    readable,
    peak,
    temperature,
    low,
    high,
    goal,
    BLOCK: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """The bits of the largest distance from `peak` that is kept, among `tokens` logits at `source`.

    That is the smallest distance within which there are `goal` tokens, or with `BY_MASS` tokens of
    weight `goal`. Distances that division by `temperature` makes equal to it are kept, too. Within
    `low` there are too few tokens, and within `high` enough. Both are bits of distances, and -1 is
    less than any. `source` may be read up to `readable`. Each turn of the loop reads the logits
    once. It divides the interval from `low` to `high` into four parts, keeps the part that holds
    the cut, and shrinks it to the tokens in it.
    """
    slope = slope_of(temperature)
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        in_first, in_second = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        in_third = tl.zeros((BLOCK,), tl.float32)
        nearest, farthest = tl.full((BLOCK,), _NONE, tl.int32), tl.full((BLOCK,), -1, tl.int32)
        for start in tl.range(0, tokens, BLOCK, num_stages=3):
            bits, weights = _turn(source, start, tokens, readable, peak, slope, BLOCK, BY_MASS)
            in_first += tl.where(bits <= first, weights, 0.0)
            in_second += tl.where(bits <= second, weights, 0.0)
            in_third += tl.where(bits <= third, weights, 0.0)
            nearest = tl.minimum(nearest, tl.where(bits > low, bits, _NONE))
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
    return closed(high, temperature)


@triton.jit
def mass_within(source, tokens, readable, peak, temperature, limit, BLOCK: tl.constexpr):
    """The weight of the tokens whose distance from `peak` has bits of at most `limit`. The other
    arguments are those of `find_cut`."""
    slope = slope_of(temperature)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, tokens, BLOCK, num_stages=3):
        bits, weights = _turn(source, start, tokens, readable, peak, slope, BLOCK, True)
        sums += tl.where(bits <= limit, weights, 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def closed(distance, temperature):
    """The bits of the largest distance that division by `temperature` makes equal to `distance`
    (bits). Division can make up to three neighbours equal."""
    scaled = tl.div_rn(distance.to(tl.float32, bitcast=True), temperature)
    for _ in tl.static_range(3):
        beyond = (distance + 1).to(tl.float32, bitcast=True)
        distance = tl.where(tl.div_rn(beyond, temperature) == scaled, distance + 1, distance)
    return distance


@triton.jit
def slope_of(temperature):
    """The factor of a distance in the exponent of its token's weight, which is to base 2."""
    return tl.div_rn(-1.4426950408889634 + tl.zeros_like(temperature), temperature)


@triton.jit
def distances_of(values, peak, there):
    """The distances of logits `values` from `peak`, and their bits, which are above all others
    unless a token is `there`."""
    below = peak - values.to(tl.float32)
    return below, tl.where(there, below.to(tl.int32, bitcast=True), _NONE)


@triton.jit
def _turn(source, start, tokens, readable, peak, slope, BLOCK: tl.constexpr, BY_MASS: tl.constexpr):
    """The bits of a block's distances, and what each token adds to the count or the weight."""
    columns = start + tl.arange(0, BLOCK)
    # `readable` is a multiple of a vector, so that loads are whole vectors. Columns from `tokens`
    # on hold no token.
    values = tl.load(source + columns, mask=columns < readable, other=float("-inf"))
    below, bits = distances_of(values, peak, columns < tokens)
    if BY_MASS:
        return bits, tl.exp2(below * slope)
    else:
        return bits, tl.full((BLOCK,), 1.0, tl.float32)
