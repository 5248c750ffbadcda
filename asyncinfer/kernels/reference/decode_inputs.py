"""The inputs of a decode step, from the slots' state on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["DecodeInputs", "decode_inputs"]


class DecodeInputs(NamedTuple):
    """One query token for each of `n` rows."""

    #: int64 `[n]`: the query token and its position, 0 in a row of padding.
    tokens: torch.Tensor
    positions: torch.Tensor
    #: int64 `[n]`: position of the token to draw, and its index into the flat history.
    draw_positions: torch.Tensor
    draw_places: torch.Tensor
    #: int64 `[groups, n]`: the KV slot of the query token in each KV group, -1 for padding.
    slot_mapping: torch.Tensor
    #: int32 `[n]`: tokens of the sequence, the query token among them; 0 in a row of padding.
    seq_lens: torch.Tensor
    #: int32 `[groups, n, width]`.
    block_tables: torch.Tensor
    #: int32 `[words, n]`: the words of each slot's options, without the last two.
    options: torch.Tensor
    #: int64 `[n]`: the seed in the last two words of each slot's options.
    seeds: torch.Tensor


def decode_inputs(
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    options: torch.Tensor,
    history: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """The inputs of the next step of the slots `rows` int32 `[n]`, n >= 1. Increments the slots'
    positions.

    `positions` int32 `[slots]`: position of each slot's next query token; always -1 for the slot
    that rows of padding share. `tables` int32 `[slots, groups, width]`: block tables of each KV
    group. `options` int32 `[slots, words + 2]`. `history` int32 `[slots, capacity]`: tokens.
    """
    slots = rows.long()
    now = positions.index_select(0, slots)
    padding = now < 0
    at = now.clamp(min=0).long()
    places = slots * history.shape[1] + at
    # Rows of padding share a slot, and all write the same value.
    positions.index_copy_(0, slots, now + (~padding).int())
    row_tables = tables.index_select(0, slots).transpose(0, 1)
    index = torch.div(at, block_size, rounding_mode="floor")[None, :, None]
    blocks = row_tables.gather(2, index.expand(len(row_tables), -1, -1))[:, :, 0].long()
    row_options = options.index_select(0, slots)
    return DecodeInputs(
        tokens=history.view(-1).index_select(0, places).long(),
        positions=at,
        draw_positions=at + 1,
        draw_places=places + 1,
        slot_mapping=(blocks * block_size + at % block_size).masked_fill_(padding, -1),
        seq_lens=now + 1,
        block_tables=row_tables.contiguous(),
        options=row_options[:, :-2].t().contiguous(),
        seeds=row_options[:, -2:].contiguous().view(torch.int64)[:, 0],
    )
