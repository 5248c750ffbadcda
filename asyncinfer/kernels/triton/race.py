"""The exponential variables by which a token is drawn: hashes of (seed, position, token id).
`kernels/noise.py` says why, and has the same arithmetic in torch."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["race", "race_keys"]

_SCALE = tl.constexpr(-(2.0**-31) * (1 - 2.0**-24))
_HALF = tl.constexpr(-(2.0**-32))


@triton.jit
def race_keys(seed, position):
    """The two uint32 keys of a row, the second one odd, from the row's int64 seed and its position,
    by the finaliser of splitmix64 (Steele et al., 2014)."""
    x = seed.to(tl.uint64, bitcast=True)
    x += (position.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32) | 1


@triton.jit
def race(tokens, low, high):
    """Minus an exponential variable of rate 1, float32, for each of `tokens`."""
    x = tokens.to(tl.uint32)
    # lowbias32 (Wellons, 2018), then one round keyed by both of the row's keys.
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    x = (x ^ low) * high
    x = (x ^ (x >> 16)) * 0x846CA68B
    bits = (x & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    return _log1p(bits * _SCALE + _HALF)


@triton.jit
def _log1p(x):
    """log(1 + x) for -1 < x < 0, corrected for the digits that 1 + x rounds away (Kahan)."""
    whole = 1.0 + x
    lost = whole - 1.0
    safe = tl.where(lost == 0.0, -1.0, lost)
    return tl.where(lost == 0.0, x, tl.log(whole) * tl.div_rn(x, safe))
