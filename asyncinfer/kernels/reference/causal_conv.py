"""The causal short convolution over rows of different lengths, with its state."""

from __future__ import annotations

import torch

from asyncinfer.kernels.row_spans import RowSpans

__all__ = ["causal_conv"]


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor,
    spans: RowSpans,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel's convolution with a filter of its own, over the token and those before it:
    `y[t] = sum over j of weight[j] * x[t - width + 1 + j]`, and `bias`. It is computed in float32.

    Args:
        x: `[tokens, channels]`, row after row.
        weight: `[width, channels]`; `bias` `[channels]` or None.
        before: `[rows, width - 1, channels]` in x's dtype: the inputs of the tokens before each
            row, zero before a sequence.
        spans: the rows, and the tokens after which the state is wanted.

    Returns `y` `[tokens, channels]` in x's dtype, and the states `[marks, width - 1, channels]`,
    which are the inputs of the last `width - 1` tokens.
    """
    past = weight.shape[0] - 1
    if spans.single:
        inputs = torch.cat((before, x[:, None]), dim=1)
        y = (inputs.float() * weight.float()).sum(dim=1)
        states = spans.at_marks(inputs[:, 1:])
    else:
        # Each row's inputs behind its state. What runs over from one row into the next is dropped.
        there = spans.padded(past)
        padded = x.new_empty(there.size, x.shape[1])
        padded.index_copy_(0, there.tokens, x)
        padded.index_copy_(0, there.room, before.flatten(0, 1))
        wide, end = padded.float(), there.size - past
        y = wide[:end] * weight[0].float()
        for j in range(1, past + 1):
            y.addcmul_(wide[j : end + j], weight[j].float())
        y = y.index_select(0, there.tokens - past)
        states = padded[there.before_marks]
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype), states
