"""Where a recorded step leaves its draws: the Triton kernel against plain Python, and as machine
code."""

from __future__ import annotations

import math

import pytest
import torch
from kernels.compiled import compiled_for, recorded
from kernels.targets import Target

from asyncinfer.kernels import ops, triton
from asyncinfer.kernels.reference.keep_draws import keep_draws

IN_FLIGHT, ROWS, PLACES = 3, 20, 100


@pytest.mark.parametrize("count", [1, 5, ROWS])
def test_keep_draws(target: Target, count: int) -> None:
    def there(values: torch.Tensor) -> torch.Tensor:
        return values.to(target.device)

    for kernel in (keep_draws, triton.keep_draws, ops.keep_draws):
        history = torch.full((PLACES,), -1, dtype=torch.int32, device=target.device)
        results = torch.full((IN_FLIGHT, 2, ROWS), -1, dtype=torch.int32, device=target.device)
        turn = torch.zeros(1, dtype=torch.int64, device=target.device)
        expected_history, expected = [-1] * PLACES, results.tolist()
        for step in range(IN_FLIGHT + 2):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 200_000, (count,), generator=generator)
            peaks = torch.randn(count, generator=generator)
            peaks[-1] = math.nan
            places = torch.randperm(PLACES, generator=generator)[:count]
            kernel(there(tokens), there(peaks), there(places), history, results, turn)
            for place, token in zip(places.tolist(), tokens.tolist(), strict=True):
                expected_history[place] = token
            both = expected[step % IN_FLIGHT]
            both[0][:count], both[1][:count] = tokens.tolist(), peaks.view(torch.int32).tolist()
            assert turn.tolist() == [(step + 1) % IN_FLIGHT]
        assert history.tolist() == expected_history
        assert results.tolist() == expected


def test_what_does_not_fit_is_refused() -> None:
    def call(count: int = 2, **changes: torch.Tensor) -> None:
        given = {
            "tokens": torch.zeros(count, dtype=torch.int64),
            "peaks": torch.zeros(count),
            "places": torch.zeros(count, dtype=torch.int64),
            "history": torch.zeros(9, dtype=torch.int32),
            "results": torch.zeros(2, 2, 4, dtype=torch.int32),
            "turn": torch.zeros(1, dtype=torch.int64),
        }
        ops.keep_draws(**{**given, **changes})

    call()
    for changes in (
        {"tokens": torch.zeros(2, dtype=torch.int32)},
        {"peaks": torch.zeros(2, dtype=torch.float64)},
        {"places": torch.zeros(3, dtype=torch.int64)},
        {"results": torch.zeros(2, 3, 4, dtype=torch.int32)},
        {"turn": torch.zeros(2, dtype=torch.int64)},
    ):
        with pytest.raises(ValueError, match="kernel keep_draws"):
            call(**changes)
    with pytest.raises(ValueError, match="kernel keep_draws"):
        call(5)


def test_one_code_whatever_the_batch() -> None:
    def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    int32, int64 = torch.int32, torch.int64
    with recorded() as launches:
        for rows in (3, 256):
            triton.keep_draws(
                meta(int64, rows),
                meta(torch.float32, rows),
                meta(int64, rows),
                meta(int32, 257 * 131_073),
                meta(int32, 4, 2, 256),
                meta(int64, 1),
            )
    assert [launch.grid for launch in launches] == [(1,), (1,)]
    first, other = map(compiled_for, launches)
    assert other == first
