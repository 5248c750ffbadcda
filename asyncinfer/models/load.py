"""From a checkpoint's folder to a `Decoder` on a device."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncinfer.models.decoder import Decoder
from asyncinfer.weights import OnProgress

__all__ = ["load_model"]


def load_model(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
) -> Decoder:
    """Load the checkpoint in `folder`; `ModelLoadError` before any device memory is taken."""
    raise NotImplementedError
