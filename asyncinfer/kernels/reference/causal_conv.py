"""The causal short convolution over rows of different lengths, with its state."""

from __future__ import annotations

import torch

__all__ = ["causal_conv"]


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor,
    rows: torch.Tensor,
    marks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel's convolution with a filter of its own, over the token and those before it:
    `y[t] = sum over j of weight[j] * x[t - width + 1 + j]`, and `bias`. It is computed in float32.

    Args:
        x: `[tokens, channels]`, row after row.
        weight: `[width, channels]`; `bias` `[channels]` or None.
        before: `[rows, width - 1, channels]` in x's dtype: the inputs of the tokens before each
            row, zero before a sequence.
        rows: int64 `[tokens]`: the row of each token, ascending.
        marks: int64 `[marks]`: tokens after which the state is wanted.

    Returns `y` `[tokens, channels]` in x's dtype, and the states `[marks, width - 1, channels]`,
    which are the inputs of the last `width - 1` tokens.
    """
    past = weight.shape[0] - 1
    if len(x) == len(before):
        # A token for each row.
        inputs = torch.cat((before, x[:, None]), dim=1)
        y = (inputs.float() * weight.float()).sum(dim=1)
        states = inputs[:, 1:].index_select(0, marks)
    else:
        # Each row's inputs behind its state. What runs over from one row into the next is dropped.
        places = torch.arange(len(x), device=x.device) + (rows + 1) * past
        padded = x.new_empty(len(x) + before.shape[0] * past, x.shape[1])
        padded[places] = x
        held = torch.ones(len(padded), dtype=torch.bool, device=x.device)
        held[places] = False
        padded[held] = before.flatten(0, 1)
        wide, end = padded.float(), len(padded) - past
        y = wide[:end] * weight[0].float()
        for j in range(1, past + 1):
            y.addcmul_(wide[j : end + j], weight[j].float())
        y = y.index_select(0, places - past)
        back = torch.arange(1 - past, 1, device=x.device)
        states = padded[places.index_select(0, marks)[:, None] + back]
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype), states
