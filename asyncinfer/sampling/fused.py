"""The fast path of a GPU: greedy rows and draws, with all filters but typical, in one operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.twins import has_triton_twin
from asyncinfer.sampling.noise import mix_seeds
from asyncinfer.sampling.table import Uses
from asyncinfer.sampling.transfer import upload

__all__ = ["draw_fused", "fuses"]


def fuses(like: torch.Tensor) -> bool:
    """Whether there is such an operator on the device of `like`; elsewhere its twin is the slower
    one."""
    return has_triton_twin("sample", like)


def draw_fused(
    logits: torch.Tensor,
    positions: npt.NDArray[np.int64],
    table: npt.NDArray[Any],
    drawing: npt.NDArray[np.bool_],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 `[n]` and each row's largest logit, float32 `[n]`.

    Args:
        logits: float32 `[n, vocab]`, left as they are.
        positions, table: `[n]`, as in `LogitChanges.apply`.
        drawing: `[n]`, False where the most likely token is wanted.
    """
    if not drawing.any():
        tokens, peak, _ = ops.sample(logits)
        return tokens, peak
    seeds = mix_seeds(table["seed"]).view(np.int64)
    temperature = np.where(drawing, table["temperature"], 0).astype(np.float32)
    if not (table["uses"][drawing] & Uses.LIKELY).any():
        keys = upload(logits.device, seeds, positions, temperature)
        tokens, peak, _ = ops.sample(logits, *keys)
        return tokens, peak
    *keys, top_k, top_p, min_p = upload(
        logits.device,
        seeds,
        positions,
        temperature,
        np.minimum(table["top_k"], logits.shape[1]).astype(np.int32),
        table["top_p"].astype(np.float32),
        table["min_p"].astype(np.float32),
    )
    tokens, peak, _ = ops.sample(logits, *keys, top_k=top_k, top_p=top_p, min_p=min_p)
    return tokens, peak
