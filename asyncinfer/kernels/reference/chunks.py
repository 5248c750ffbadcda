"""Computes a recurrence over each row's tokens for many tokens and rows at once, in chunks of like
length (chunkwise parallel form)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

import torch

__all__ = ["CHUNK", "compute_in_chunks"]

#: Tokens of a chunk at most: within one, the work grows with their square.
CHUNK: Final = 64


def compute_in_chunks(
    chunk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    silent: int,
    outputs: torch.Tensor,
    before: torch.Tensor,
    rows: torch.Tensor,
    marks: torch.Tensor,
) -> torch.Tensor:
    """Fill `outputs` `[tokens, heads, dim]`, and return the states after `marks` `[marks, heads,
    ...]`.

    Args:
        chunk: `chunk(*inputs, state)` for one chunk of some sequences, each input being
            `[sequences, heads, tokens, ...]`: their outputs, laid out alike, and their last states.
        inputs: `[tokens, heads, ...]` each.
        silent: how many of the last inputs make a token leave its state as it is where they are 0.
        before: `[rows, heads, ...]`: the state before each row.
        rows: int64 `[tokens]`: the row of each token, ascending; each row has one.
        marks: int64 `[marks]`, ascending.
    """
    after = before.new_empty(len(marks), *before.shape[1:])
    state = before.clone()
    kept = {mark: place for place, mark in enumerate(marks.tolist())}
    first_silent, device = len(inputs) - silent, rows.device
    for chunks in _chunks(rows, len(before), kept):
        # Chunks of like length are computed together.
        first = torch.tensor([begin for _, begin, _ in chunks], device=device)
        count = torch.tensor([tokens for _, _, tokens in chunks], device=device)
        chunk_rows = torch.tensor([row for row, _, _ in chunks], device=device)
        width = torch.arange(max(tokens for _, _, tokens in chunks), device=device)
        real = width < count[:, None]
        # Places behind a shorter chunk are clamped. Their inputs are hidden, so they change no
        # state.
        place = (first[:, None] + width).clamp_(max=len(rows) - 1)
        parts = []
        for number, each in enumerate(inputs):
            part = each[place]
            if number >= first_silent:
                hidden = ~real.view(*real.shape, *[1] * (part.ndim - 2))
                part = part.masked_fill(hidden, 0)
            parts.append(part.transpose(1, 2))
        y, reached = chunk(*parts, state.index_select(0, chunk_rows))
        outputs[place[real]] = y.transpose(1, 2)[real]
        state[chunk_rows] = reached
        for number, (_, begin, tokens) in enumerate(chunks):
            mark = kept.get(begin + tokens - 1)
            if mark is not None:
                after[mark] = reached[number]
    return after


def _chunks(
    rows: torch.Tensor, count: int, marks: dict[int, int]
) -> list[list[tuple[int, int, int]]]:
    """Lists of chunks that are computed one list after another, each chunk a `(row, first token,
    tokens)`. The chunks of a list are of different rows, and none has twice the tokens of another.
    Chunks end at marks."""
    ends = torch.bincount(rows, minlength=count).cumsum(0).tolist()
    parts: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    stops, begin = sorted({*marks, *(end - 1 for end in ends)}), 0
    row = turn = 0
    for stop in stops:
        while begin <= stop:
            tokens = min(stop + 1 - begin, CHUNK)
            parts[turn, tokens.bit_length()].append((row, begin, tokens))
            begin, turn = begin + tokens, turn + 1
        if begin == ends[row]:
            row, turn = row + 1, 0
    return [parts[key] for key in sorted(parts)]
