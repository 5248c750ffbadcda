"""The random numbers: equal to their twin, uniform, independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import reference
from scipy import stats

from asyncinfer.kernels.noise import draw_race, hash_tokens, mix_tokens, row_keys


def hashes(seeds: list[int], positions: list[int], vocab: int) -> torch.Tensor:
    keys = row_keys(np.array(seeds, np.uint64), np.array(positions, np.int64))
    return hash_tokens(mix_tokens(vocab), torch.from_numpy(keys))


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31), vocab=st.integers(1, 300))
def test_hash_equals_its_twin(seed: int, position: int, vocab: int) -> None:
    expected = [reference.hashed(seed, position, token) for token in range(vocab)]
    assert hashes([seed], [position], vocab)[0].tolist() == expected


def test_every_bit_of_the_seed_and_the_position_counts() -> None:
    base = hashes([0], [0], 64)
    for bit in range(64):
        assert not torch.equal(hashes([1 << bit], [0], 64), base)
    for bit in range(31):
        assert not torch.equal(hashes([0], [1 << bit], 64), base)


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_neighbours_are_independent(along: str) -> None:
    n, vocab = 60_000, 12
    if along == "seeds":
        drawn = hashes(list(range(n)), [5] * n, vocab)
    else:
        drawn = hashes([5] * n, list(range(n)), vocab)
    cells = (drawn >> 26).numpy()
    first, second = (cells[:, :-1], cells[:, 1:]) if along == "tokens" else (cells[:-1], cells[1:])
    pairs = np.bincount((first * 32 + second).ravel(), minlength=1024)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_the_smallest_of_many_is_distributed_as_it_should_be() -> None:
    n, vocab = 4000, 2000
    smallest = hashes([9] * n, list(range(n)), vocab).amin(dim=1).double().numpy()
    uniform = 1 - (1 - (smallest + 0.5) / 2**31) ** vocab
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3


def test_the_race_never_takes_a_token_of_weight_zero() -> None:
    n = 2000
    keys = torch.from_numpy(row_keys(np.full(n, 3, np.uint64), np.arange(n)))
    weights = torch.zeros(n, 50)
    weights[:, 17] = 1e-30
    assert set(draw_race(weights, mix_tokens(50), keys).tolist()) == {17}


def test_the_largest_hash_gives_a_finite_variable() -> None:
    # The key that makes the hash of token 0 the largest there is: undo the round.
    target = 2**31 - 1
    x = target * pow(0x846CA68B, -1, 2**32) % 2**32
    x ^= x >> 16
    keys = torch.tensor([[0, 1]], dtype=torch.int32)
    mixed = torch.tensor([x - 2**32 if x >= 2**31 else x], dtype=torch.int32)
    assert hash_tokens(mixed, keys).item() == target
    weights = torch.tensor([[0.0, 1.0]])
    assert draw_race(weights, mixed.repeat(2), keys).item() == 1


def test_frequencies_down_to_one_in_a_million() -> None:
    # Resolution near 0: with 24 bits, tokens this rare would come in steps of 6e-8.
    n, vocab = 2**22, 2
    keys = torch.from_numpy(row_keys(np.full(n, 1, np.uint64), np.arange(n)))
    weights = torch.tensor([[1.0, 1e-5]]).expand(n, vocab)
    rare = int(draw_race(weights, mix_tokens(vocab), keys).sum())
    expected = n * 1e-5
    assert abs(rare - expected) < 4 * expected**0.5
