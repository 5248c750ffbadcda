"""The causal convolution: rows of any lengths, cut anywhere, against torch's own `conv1d`."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from asyncinfer.kernels import ops
from asyncinfer.kernels.row_spans import RowSpans

CHANNELS = 6


def one_by_one(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A whole sequence `[tokens, channels]` by torch's own operator."""
    padded = F.pad(x.t(), (weight.shape[0] - 1, 0))
    return F.conv1d(padded, weight.t()[:, None], bias, groups=CHANNELS).t()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_any_cuts_give_the_whole(width: int, biased: bool) -> None:
    torch.manual_seed(width)
    weight = torch.randn(width, CHANNELS)
    bias = torch.randn(CHANNELS) if biased else None
    sequences = [torch.randn(length, CHANNELS) for length in (11, 1, 7)]
    right = [one_by_one(x, weight, bias) for x in sequences]
    states = [torch.zeros(width - 1, CHANNELS) for _ in sequences]
    done = [0, 0, 0]
    for step in ({0: 1, 2: 1}, {0: 4, 1: 1}, {0: 1, 2: 5}, {0: 5, 2: 1}):
        parts = [sequences[row][done[row] : done[row] + count] for row, count in step.items()]
        counts = [*step.values()]
        ends = list(accumulate(counts))
        y, after = ops.causal_conv(
            torch.cat(parts),
            weight,
            bias,
            torch.stack([states[row] for row in step]),
            RowSpans(counts, [end - 1 for end in ends]),
        )
        for row, part, state in zip(step, y.split([*step.values()]), after, strict=True):
            end = done[row] + len(part)
            torch.testing.assert_close(part, right[row][done[row] : end])
            before = F.pad(sequences[row][:end], (0, 0, width - 1, 0))
            assert torch.equal(state, before[end:])
            states[row], done[row] = state, end
    assert done == [11, 1, 7]


def test_states_within_a_row() -> None:
    x, weight = torch.randn(9, CHANNELS), torch.randn(3, CHANNELS)
    before, spans = torch.randn(2, 2, CHANNELS), RowSpans([5, 4], [0, 3, 4, 5, 8])
    _, states = ops.causal_conv(x, weight, None, before, spans)
    assert torch.equal(states[0], torch.stack((before[0, 1], x[0])))
    assert torch.equal(states[1], x[2:4])
    assert torch.equal(states[2], x[3:5])
    assert torch.equal(states[3], torch.stack((before[1, 1], x[5])))
    assert torch.equal(states[4], x[7:9])


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(ValueError, match="causal_conv"):
        ops.causal_conv(x, weight, None, torch.zeros(1, 2, 3), RowSpans([2], []))
    with pytest.raises(ValueError, match="causal_conv"):
        ops.causal_conv(x, weight, None, torch.zeros(1, 3, 3), RowSpans([3], []))
