"""The inputs of a decode step in one launch, read from the slots' state on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asyncinfer.kernels.reference.decode_inputs import DecodeInputs
from asyncinfer.kernels.triton.launched import launched

__all__ = ["decode_inputs"]

#: Entries of a block table that one program copies.
_ENTRIES = 1024


def decode_inputs(
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    options: torch.Tensor,
    history: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """As the reference kernel."""
    count, device = rows.shape[0], rows.device
    groups, width = tables.shape[1:]
    words = options.shape[1] - 2
    numbers = torch.empty((5 + groups, count), dtype=torch.int64, device=device)
    # Sequence lengths, and the options word by word.
    figures = torch.empty((1 + words, count), dtype=torch.int32, device=device)
    block_tables = torch.empty((groups, count, width), dtype=torch.int32, device=device)
    _decode_inputs[(count, groups, triton.cdiv(width, _ENTRIES))](
        rows,
        positions,
        tables,
        options,
        history,
        numbers,
        figures,
        block_tables,
        count,
        history.shape[1],
        width,
        WORDS=words,
        WORDS_BLOCK=triton.next_power_of_2(words),
        GROUPS=groups,
        BLOCK_SIZE=block_size,
        ENTRIES=_ENTRIES,
        num_warps=4,
    )
    tokens, at, draw_positions, draw_places, seeds = numbers[:5].unbind(0)
    return DecodeInputs(
        tokens,
        at,
        draw_positions,
        draw_places,
        numbers[5:],
        figures[0],
        block_tables,
        figures[1:],
        seeds,
    )


# Capacity and width follow from the memory that was free when an engine opened, and must not make
# the kernel compile again.
@launched(do_not_specialize=["count", "capacity", "width"])
def _decode_inputs(
    rows,
    positions,
    tables,
    slot_words,
    history,
    numbers,
    figures,
    block_tables,
    count,
    capacity,
    width,
    WORDS: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Program `(row, group, stretch)` copies a stretch of the row's block table in one KV group.
    The row's first program does everything else. It alone reads the position that it changes."""
    row = tl.program_id(0)
    group = tl.program_id(1)
    stretch = tl.program_id(2)
    slot = tl.load(rows + row).to(tl.int64)
    table = tables + slot * GROUPS * width
    entries = stretch * ENTRIES + tl.arange(0, ENTRIES)
    inside = entries < width
    copied = tl.load(table + group * width + entries, mask=inside, other=0)
    target = block_tables + (group.to(tl.int64) * count + row) * width
    tl.store(target + entries, copied, mask=inside)
    if group + stretch == 0:
        now = tl.load(positions + slot)
        at = tl.maximum(now, 0).to(tl.int64)
        place = slot * capacity + at
        tl.store(numbers + row, tl.load(history + place).to(tl.int64))
        tl.store(numbers + count + row, at)
        tl.store(numbers + 2 * count + row, at + 1)
        tl.store(numbers + 3 * count + row, place + 1)
        words = slot_words + slot * (WORDS + 2)
        low = tl.load(words + WORDS).to(tl.int64) & 0xFFFFFFFF
        tl.store(numbers + 4 * count + row, (tl.load(words + WORDS + 1).to(tl.int64) << 32) | low)
        tl.store(figures + row, now + 1)
        word = tl.arange(0, WORDS_BLOCK)
        copied_words = tl.load(words + word, mask=word < WORDS, other=0)
        tl.store(figures + (1 + word) * count + row, copied_words, mask=word < WORDS)
        for each in tl.static_range(GROUPS):
            block = tl.load(table + each * width + at // BLOCK_SIZE).to(tl.int64)
            written = tl.where(now >= 0, block * BLOCK_SIZE + at % BLOCK_SIZE, -1)
            tl.store(numbers + (5 + each) * count + row, written)
        if now >= 0:
            tl.store(positions + slot, now + 1)
