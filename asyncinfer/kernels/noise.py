"""Counter-based randomness: one exponential variable per (seed, position, token id).

The race of these variables is the argmin of `E / p` over tokens, for variables `E` and
probabilities `p`. It is the same as Gumbel-max on `log p`, and draws a token with a probability
exactly proportional to `p`. A variable depends on its three keys only, so a draw is the same in
every batch, after a preemption, and in whichever order it is computed.

A row's (seed, position) becomes 64 key bits (splitmix64). Each token id is mixed once into 32 bits
(lowbias32). For each row and token there remains one multiply-xorshift-multiply round, keyed by
both halves of the row's bits. All of this is wrapping integer arithmetic, equal on every device.
`triton/race.py` has it in Triton, and `tests/sampling/reference.py` in plain Python.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "draw_race",
    "hash_tokens",
    "key_rows",
    "mix_seeds",
    "mix_tokens",
    "row_keys",
    "row_uniforms",
    "seed_bits",
]

U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
#: 0x846CA68B as a signed number: torch multiplies int32 and keeps the low 32 bits.
_FACTOR = 0x846CA68B - 2**32
#: The largest u is 1 - 2^-24, so that no variable is infinite.
_SCALE = -(2.0**-31) * (1 - 2.0**-24)


def row_uniforms(
    seeds: U64, positions: npt.NDArray[np.int64], stream: int
) -> npt.NDArray[np.float64]:
    """float64 `[n]` in (0, 1): one uniform variable per row and stream, independent of the race."""
    # The odd factor is another one than the race's, so that no stream has the race's counters. It
    # is one of xxHash64's.
    offset = np.uint64((stream + 1) * 0x9FB21C651E98DF25 % 2**64)
    bits = _splitmix(_splitmix(_row_bits(seeds, positions)) ^ offset)
    halves: npt.NDArray[np.float64] = (bits >> np.uint64(12)).astype(np.float64) + 0.5
    return halves * 2.0**-52


def row_keys(seeds: U64, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """int32 `[n, 2]`: the key of each row. The second is odd, hence invertible as a factor."""
    keys = _row_bits(seeds, positions).view(np.uint32).reshape(-1, 2)
    keys[:, 1] |= np.uint32(1)
    return keys.view(np.int32)


def _row_bits(seeds: U64, positions: npt.NDArray[np.int64]) -> U64:
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return _splitmix(mix_seeds(seeds) + counters)


def mix_seeds(seeds: U64) -> U64:
    """The part of rows' keys that does not depend on their positions, for `key_rows`."""
    return _splitmix(seeds + _GOLDEN)


def seed_bits(seed: int) -> np.uint64:
    """`mix_seeds` of one seed."""
    bits: np.uint64 = mix_seeds(np.array([seed & (2**64 - 1)], np.uint64))[0]
    return bits


def key_rows(bits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`row_keys` on the device: int32 `[n, 2]` from `seed_bits` as int64 `[n]` and positions."""
    counters = (positions.long() + 1) * _signed(int(_GOLDEN))
    x = bits + counters
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # int64 shifts are arithmetic: the mask makes them logical.
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return (x | 2**32).view(torch.int32).view(-1, 2)


def _signed(word: int) -> int:
    """An unsigned 64-bit word as torch's int64, which wraps."""
    return word - 2**64 if word >= 2**63 else word


def _splitmix(x: U64) -> U64:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_tokens(vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int32 `[vocab_size]`: every token id mixed (lowbias32, Wellons 2018); no two are equal."""
    x = torch.arange(vocab_size, dtype=torch.int32, device=device)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    # int32 shifts are arithmetic: the masks make these logical.
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _FACTOR
    return x ^ ((x >> 16) & 0xFFFF)


def hash_tokens(mixed: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """int32 `[n, vocab]` in `[0, 2^31)` from `mixed` int32 `[vocab]` and `keys` int32 `[n, 2]`."""
    x = torch.bitwise_xor(mixed, keys[:, :1])
    x *= keys[:, 1:]
    # An int32 shift is arithmetic: the mask makes it logical.
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _FACTOR
    return x.bitwise_and_(0x7FFFFFFF)


def draw_race(weights: torch.Tensor, mixed: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One token per row, int64 `[n]`, with probability proportional to its weight.

    Args:
        weights: float32 `[n, vocab]`, at least 0; tokens of weight 0 are never drawn.
        mixed, keys: of `mix_tokens` and `row_keys`.
    """
    hashed = hash_tokens(mixed, keys)
    # -u, with u = (hash + 0.5) / 2^31, in one operation that keeps the full resolution of a small
    # u, since a small u wins.
    half = torch.full((1,), -(2.0**-32), dtype=torch.float32, device=weights.device)
    negative = torch.add(half, hashed, alpha=_SCALE)
    # log(1 - u) is minus an exponential variable: the smallest E / weight is the most negative
    # quotient. A weight of 0 gives -0 and loses to any other.
    return torch.div(weights, negative.log1p_(), out=negative).argmin(dim=-1)
