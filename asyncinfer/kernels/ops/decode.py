"""The two ends of a decode step: its inputs; its draw, and where that goes."""

from __future__ import annotations

import torch

from asyncinfer.kernels import twins
from asyncinfer.kernels.ops.checks import check
from asyncinfer.kernels.reference.decode_inputs import DecodeInputs

__all__ = ["decode_inputs", "keep_draws", "sample"]


def decode_inputs(
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    options: torch.Tensor,
    history: torch.Tensor,
    block_size: int,
    *,
    reference: bool = False,
) -> DecodeInputs:
    """The inputs of the next decode step of the slots `rows`, from what the device knows of them;
    all int32. See the reference twin."""
    name = "decode_inputs"
    given = rows, positions, tables, options, history
    check(all(t.dtype is torch.int32 and t.is_contiguous() for t in given), name, *given)
    slots = positions.shape[0]
    right = rows.ndim == positions.ndim == 1
    for its, dimensions in ((tables, 3), (options, 2), (history, 2)):
        right = right and its.ndim == dimensions and its.shape[0] == slots
    right = right and options.shape[1] > 2
    check(right, name, *given)
    result: DecodeInputs = twins.twin(name, rows, reference)(
        rows, positions, tables, options, history, block_size
    )
    return result


def keep_draws(
    tokens: torch.Tensor,
    peaks: torch.Tensor,
    places: torch.Tensor,
    history: torch.Tensor,
    results: torch.Tensor,
    turn: torch.Tensor,
    *,
    reference: bool = False,
) -> None:
    """Tokens to the history and, with the peaks, to the next place of `results`. See the reference
    twin."""
    name = "keep_draws"
    right = tokens.dtype is places.dtype is turn.dtype is torch.int64
    right = right and (peaks.dtype, history.dtype) == (torch.float32, torch.int32)
    right = right and tokens.ndim == 1 and tokens.shape == peaks.shape == places.shape
    check(right and turn.shape == (1,), name, tokens, peaks, places, history, turn)
    right = results.dtype is torch.int32 and results.ndim == 3 and results.shape[1] == 2
    right = right and results.is_contiguous() and history.is_contiguous()
    check(right and tokens.shape[0] <= results.shape[2], name, tokens, results, history)
    twins.twin(name, tokens, reference)(tokens, peaks, places, history, results, turn)


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    reference: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token, the largest logit and the token's logprob for each row of `logits` `[n, vocab]`;
    options by row, greedy without a temperature. See the reference twin."""
    right = logits.ndim == 2 and logits.shape[1] > 0 and logits.stride(1) == 1
    check(right and logits.is_floating_point(), "sample", logits)
    rows = logits.shape[:1]
    if temperature is not None:
        check(seeds is not None and seeds.dtype is torch.int64, "sample", logits, seeds)
        known = positions is not None and positions.dtype in (torch.int32, torch.int64)
        check(known, "sample", logits, positions)
        for keys in (seeds, positions):
            check(keys is not None and keys.shape == rows, "sample", logits, keys)
    options = ((temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32))
    for option, dtype in (*options, (min_p, torch.float32)):
        right = option is None or (option.shape == rows and option.dtype is dtype)
        check(right and (option is None or temperature is not None), "sample", logits, option)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = twins.twin(
        "sample", logits, reference
    )(logits, seeds, positions, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return result
