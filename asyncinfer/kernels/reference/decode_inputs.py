"""From what a device knows of its slots to the inputs of a decode step."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["DecodeInputs", "decode_inputs"]


class DecodeInputs(NamedTuple):
    """One query token for each of `n` rows."""

    #: int64 `[n]`: the query token and its position, 0 in a row of padding.
    tokens: torch.Tensor
    positions: torch.Tensor
    #: int64 `[n]`: position of the token that is drawn, and its place in the history.
    draw_positions: torch.Tensor
    draw_places: torch.Tensor
    #: int64 `[groups, n]`: where its KV goes in each KV group, -1 in a row of padding.
    slot_mapping: torch.Tensor
    #: int32 `[n]`: tokens of the sequence, the query token among them; 0 in a row of padding.
    seq_lens: torch.Tensor
    #: int32 `[groups, n, width]`.
    block_tables: torch.Tensor
    #: int32 `[words, n]`: each of the slots' options but its last two words.
    options: torch.Tensor
    #: int64 `[n]`: those two.
    seeds: torch.Tensor


def decode_inputs(
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    options: torch.Tensor,
    history: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """The next step of the slots `rows` int32 `[n]`, n >= 1; their positions are put on by one.

    `positions` int32 `[slots]`: of each slot's next query token; always -1 for the slot that rows
    of padding share. `tables` int32 `[slots, groups, width]`: block tables of each KV group.
    `options` int32 `[slots, words + 2]`. `history` int32 `[slots, capacity]`: tokens.
    """
    slots = rows.long()
    now = positions.index_select(0, slots)
    padding = now < 0
    at = now.clamp(min=0).long()
    places = slots * history.shape[1] + at
    # Rows of padding all write the same.
    positions.index_copy_(0, slots, now + (~padding).int())
    its_tables = tables.index_select(0, slots).transpose(0, 1)
    index = torch.div(at, block_size, rounding_mode="floor")[None, :, None]
    blocks = its_tables.gather(2, index.expand(len(its_tables), -1, -1))[:, :, 0].long()
    its_options = options.index_select(0, slots)
    return DecodeInputs(
        tokens=history.view(-1).index_select(0, places).long(),
        positions=at,
        draw_positions=at + 1,
        draw_places=places + 1,
        slot_mapping=(blocks * block_size + at % block_size).masked_fill_(padding, -1),
        seq_lens=now + 1,
        block_tables=its_tables.contiguous(),
        options=its_options[:, :-2].t().contiguous(),
        seeds=its_options[:, -2:].contiguous().view(torch.int64)[:, 0],
    )
