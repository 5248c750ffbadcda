"""Which passes are recorded: the sizes of `RecordedForward`."""

from __future__ import annotations

from itertools import pairwise

import pytest

from asyncinfer.runner.recorded_forward import token_sizes


def test_sizes_go_up_by_a_half_at_most_from_32_on() -> None:
    sizes = token_sizes(1 << 20, 4096)
    assert sizes[:6] == [16, 32, 48, 64, 96, 128]
    assert all(2 * larger <= 3 * size for size, larger in pairwise(sizes[1:]))


@pytest.mark.parametrize(
    ("most", "hidden", "last"),
    [
        (2048, 1024, 2048),
        (2048, 2048, 2048),
        (2048, 2560, 1024),
        (2048, 8192, 1024),
        (16_384, 1024, 8192),
        (100, 1024, 128),
        (1, 1024, 16),
    ],
)
def test_narrow_models_have_larger_passes(most: int, hidden: int, last: int) -> None:
    assert token_sizes(most, hidden)[-1] == last
