"""From a checkpoint's folder to a `Decoder` on a device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from asyncinfer.errors import ModelLoadError
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.decoder import Decoder
from asyncinfer.models.tensors import ignored_tensor, tensor_table
from asyncinfer.weights import Checkpoint, OnProgress, WeightLoader, check_weights

__all__ = ["load_model"]


def load_model(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
) -> Decoder:
    """Load the checkpoint in `folder`, its weights converted to `dtype`.

    Weights stream onto the device one tensor at a time; `progress` hears of each. Raises
    `ModelLoadError`, before any device memory is taken, for whatever the files say that cannot be.
    """
    config = ModelConfig.from_folder(folder)
    table = tensor_table(config)
    with Checkpoint(folder) as checkpoint, torch.inference_mode():
        check_weights(checkpoint, table, partial(ignored_tensor, config=config))
        loader = WeightLoader(checkpoint, table, torch.device(device), dtype, progress)
        try:
            decoder = Decoder(config, loader)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"{device} has no room for the weights: {error}", file=str(folder)
            ) from error
        loader.finish()
    return decoder
