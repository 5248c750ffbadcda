"""The two ends of a decode step: its inputs; the draw, and where drawn tokens are written."""

from __future__ import annotations

from typing import Any

import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.dispatch import check, dispatched

__all__ = ["decode_inputs", "keep_draws", "sample"]


def _check_decode_inputs(
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    options: torch.Tensor,
    history: torch.Tensor,
    block_size: int,
) -> None:
    name = "decode_inputs"
    given = rows, positions, tables, options, history
    check(all(t.dtype is torch.int32 and t.is_contiguous() for t in given), name, *given)
    slots = positions.shape[0]
    right = rows.ndim == positions.ndim == 1
    for by_slot, dimensions in ((tables, 3), (options, 2), (history, 2)):
        right = right and by_slot.ndim == dimensions and by_slot.shape[0] == slots
    right = right and options.shape[1] > 2
    check(right, name, *given)


def _check_keep_draws(
    tokens: torch.Tensor,
    peaks: torch.Tensor,
    places: torch.Tensor,
    history: torch.Tensor,
    results: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    name = "keep_draws"
    right = tokens.dtype is places.dtype is turn.dtype is torch.int64
    right = right and (peaks.dtype, history.dtype) == (torch.float32, torch.int32)
    right = right and tokens.ndim == 1 and tokens.shape == peaks.shape == places.shape
    check(right and turn.shape == (1,), name, tokens, peaks, places, history, turn)
    right = results.dtype is torch.int32 and results.ndim == 3 and results.shape[1] == 2
    right = right and results.is_contiguous() and history.is_contiguous()
    check(right and tokens.shape[0] <= results.shape[2], name, tokens, results, history)


def _check_sample(
    logits: torch.Tensor,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    **filters: Any,
) -> None:
    right = logits.ndim == 2 and logits.shape[1] > 0 and logits.stride(1) == 1
    check(right and logits.is_floating_point(), "sample", logits)
    rows = logits.shape[:1]
    if temperature is not None:
        check(seeds is not None and seeds.dtype is torch.int64, "sample", logits, seeds)
        known = positions is not None and positions.dtype in (torch.int32, torch.int64)
        check(known, "sample", logits, positions)
        for keys in (seeds, positions):
            check(keys is not None and keys.shape == rows, "sample", logits, keys)
    dtypes = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    options = [(filters.get(name), dtype) for name, dtype in dtypes.items()]
    for option, dtype in ((temperature, torch.float32), *options):
        right = option is None or (option.shape == rows and option.dtype is dtype)
        check(right and (option is None or temperature is not None), "sample", logits, option)


decode_inputs = dispatched(reference.decode_inputs, _check_decode_inputs)
keep_draws = dispatched(reference.keep_draws, _check_keep_draws)
sample = dispatched(reference.sample, _check_sample)
