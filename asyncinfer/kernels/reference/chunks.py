"""Computes a linear recurrence over each row's tokens in chunks, as Yang et al. (Gated Delta
Networks, 2024) and Dao and Gu (Transformers are SSMs, 2024) do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from asyncinfer.kernels.row_spans import ChunkBatch, RowSpans

__all__ = ["PreparedChunks", "compute_in_chunks"]


@dataclass(frozen=True, slots=True)
class PreparedChunks:
    """What chunks need of their own tokens, before the state that each begins with is known. From a
    state `S` a chunk makes `lasting * S + kept @ C`, where its tokens change it by `C = change -
    corrected @ S`, and their outputs are `read @ S + seen @ C`."""

    #: `[heads, chunks, tokens, value_dim]`.
    change: torch.Tensor
    #: `[heads, chunks, 2 * tokens, key_dim]`: `corrected` above `read`; or `read` alone, where a
    #: change does not depend on the state.
    read: torch.Tensor
    #: `[heads, chunks, key_dim, tokens]`.
    kept: torch.Tensor
    #: `[heads, chunks, key_dim or 1, 1]`.
    lasting: torch.Tensor
    #: `[heads, chunks, tokens, tokens]`.
    seen: torch.Tensor


def compute_in_chunks(
    prepare: Callable[..., PreparedChunks],
    inputs: Sequence[torch.Tensor],
    silent: int,
    outputs: torch.Tensor,
    before: torch.Tensor,
    spans: RowSpans,
) -> torch.Tensor:
    """Fill `outputs` `[tokens, heads, value_dim]`, and return the states after the marks `[marks,
    heads, key_dim, value_dim]`. Only the states are computed one chunk after another.

    Args:
        prepare: takes `inputs` as chunks `[heads, chunks, tokens, ...]`.
        inputs: `[tokens, heads, ...]` each.
        silent: how many of the last inputs make a token leave its state as it is where they are 0.
        before: `[rows, heads, key_dim, value_dim]`: the state before each row.
    """
    after = before.new_empty(len(spans.marks), *before.shape[1:])
    state = before.transpose(0, 1)
    for section in spans.sections:
        prepared = [prepare(*_chunks_of(inputs, each, silent)) for each in section.batches]
        changes: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        reads: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for turn in section.turns:
            each, at = prepared[turn.batch], turn.chunks
            change = each.change[:, at]
            old = state if turn.rows is None else state.index_select(1, turn.rows)
            read = each.read[:, at] @ old
            if read.shape[2] > change.shape[2]:
                corrected, read = read.chunk(2, dim=2)
                change = change - corrected
            new = torch.addcmul(each.kept[:, at] @ change, old, each.lasting[:, at])
            changes[turn.batch].append(change)
            reads[turn.batch].append(read)
            after.index_copy_(0, turn.marks, new.index_select(1, turn.marked).transpose(0, 1))
            state = new if turn.rows is None else state.index_copy(1, turn.rows, new)
        for number, (batch, each) in enumerate(zip(section.batches, prepared, strict=True)):
            y = each.seen @ torch.cat(changes[number], dim=1)
            y = y.add_(torch.cat(reads[number], dim=1)).flatten(1, 2)
            if batch.hidden is not None:
                y = y.index_select(1, batch.real)
            outputs.index_copy_(0, batch.real_tokens, y.transpose(0, 1))
    return after


def _chunks_of(
    inputs: Sequence[torch.Tensor], batch: ChunkBatch, silent: int
) -> list[torch.Tensor]:
    """Each input as `[heads, chunks, tokens, ...]`."""
    parts = []
    for number, whole in enumerate(inputs):
        part = whole.transpose(0, 1).index_select(1, batch.tokens.flatten())
        part = part.view(whole.shape[1], *batch.tokens.shape, *whole.shape[2:])
        if batch.hidden is not None and number >= len(inputs) - silent:
            # Inputs behind a shorter chunk are hidden, so they change no state.
            hidden = batch.hidden.view(*batch.hidden.shape, *[1] * (whole.ndim - 2))
            part = part.masked_fill(hidden, 0)
        parts.append(part)
    return parts
