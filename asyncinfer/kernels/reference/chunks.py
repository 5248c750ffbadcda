"""Computes a recurrence over each row's tokens for many tokens and rows at once, in chunks of like
length (chunkwise parallel form)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asyncinfer.kernels.row_spans import RowSpans

__all__ = ["compute_in_chunks"]


def compute_in_chunks(
    chunk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    silent: int,
    outputs: torch.Tensor,
    before: torch.Tensor,
    spans: RowSpans,
) -> torch.Tensor:
    """Fill `outputs` `[tokens, heads, dim]`, and return the states after the marks `[marks, heads,
    ...]`.

    Args:
        chunk: `chunk(*inputs, state)` for one chunk of some sequences, each input being
            `[sequences, heads, tokens, ...]`: their outputs, laid out alike, and their last states.
        inputs: `[tokens, heads, ...]` each.
        silent: how many of the last inputs make a token leave its state as it is where they are 0.
        before: `[rows, heads, ...]`: the state before each row.
    """
    after = before.new_empty(len(spans.marks), *before.shape[1:])
    state = before.clone()
    first_silent = len(inputs) - silent
    for each in spans.chunks:
        parts = []
        for number, whole in enumerate(inputs):
            part = whole[each.tokens]
            if number >= first_silent and each.hidden is not None:
                # Inputs behind a shorter chunk are hidden, so they change no state.
                hidden = each.hidden.view(*each.hidden.shape, *[1] * (part.ndim - 2))
                part = part.masked_fill(hidden, 0)
            parts.append(part.transpose(1, 2))
        y, reached = chunk(*parts, state.index_select(0, each.rows))
        made = y.transpose(1, 2).flatten(0, 1).index_select(0, each.real)
        outputs.index_copy_(0, each.real_tokens, made)
        state.index_copy_(0, each.rows, reached)
        after.index_copy_(0, each.marks, reached.index_select(0, each.marked))
    return after
