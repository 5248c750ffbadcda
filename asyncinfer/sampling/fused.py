"""A GPU's fast path: greedy rows and draws with every filter except typical, in one operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.dispatch import has_triton_kernel
from asyncinfer.kernels.noise import mix_seeds
from asyncinfer.sampling.options import Uses
from asyncinfer.sampling.transfer import upload

__all__ = ["draw_fused", "fuses"]


def fuses(like: torch.Tensor) -> bool:
    """Whether the device of `like` has the operator as a kernel; elsewhere the unfused chain is
    faster."""
    return has_triton_kernel("sample", like)


def draw_fused(
    logits: torch.Tensor,
    positions: npt.NDArray[np.int64],
    table: npt.NDArray[Any],
    drawing: npt.NDArray[np.bool_],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 `[n]` and each row's largest logit, float32 `[n]`.

    Args:
        logits: float32 `[n, vocab]`, not changed.
        positions, table: `[n]`, as in `LogitProcessors.apply`.
        drawing: `[n]`, False for a greedy row.
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
