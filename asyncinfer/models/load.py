"""`load_model`: loads a checkpoint as a `Decoder` on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncinfer.errors import ModelLoadError
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.config_file import read_config
from asyncinfer.models.decoder import Decoder
from asyncinfer.models.tensors import ignored_tensor, tensor_table
from asyncinfer.weights import (
    OnProgress,
    SafetensorsCheckpoint,
    TensorFiles,
    WeightLoader,
    WeightSource,
    check_weights,
    is_out_of_memory,
)
from asyncinfer.weights.gguf import GgufCheckpoint, is_gguf

__all__ = ["load_model", "load_weights", "without_prefix"]


def load_model(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
    *,
    max_context: int | None = None,
    storage: str = "plain",
) -> Decoder:
    """Load the checkpoint in `folder`, with weights converted to `dtype`, for sequences of at most
    `max_context` tokens (None: the model's own maximum). `storage` is the format of the layers'
    matrices, as in `make_linear`.

    Weights stream onto the device one tensor at a time, and `progress` is called on the way. Raises
    `ModelLoadError` for bad files, before any device memory is taken.
    """
    with _opened(folder, device, dtype, progress) as (config, weights):
        return Decoder(config, weights, max_context, storage)


def load_weights(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of the decoder by the names of `tensor_table`, before a device lays them out for
    its matrix products. Raises as `load_model` does."""
    with _opened(folder, device, dtype, progress) as (config, weights):
        return {name: weights(name) for name in tensor_table(config)}


@contextmanager
def _opened(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None,
) -> Iterator[tuple[ModelConfig, WeightSource]]:
    """The config and the source of the weights, which must be asked for each tensor in the
    block."""
    config = read_config(folder)
    opened = GgufCheckpoint(folder) if is_gguf(Path(folder)) else SafetensorsCheckpoint(folder)
    with opened as checkpoint, torch.inference_mode():
        config = without_prefix(config, checkpoint)
        table = tensor_table(config)
        check_weights(checkpoint, table, partial(ignored_tensor, config=config))
        loader = WeightLoader(checkpoint, table, torch.device(device), dtype, progress)
        try:
            yield config, loader
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ModelLoadError(
                f"{device} has no room for the weights: {error}", file=str(folder)
            ) from error
        loader.finish()


def without_prefix(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with an empty prefix if the checkpoint's tensors lack the architecture's prefix,
    as in a model that was saved without its head."""
    prefix = config.names.prefix
    if any(name.startswith(prefix) for name in checkpoint.tensors):
        return config
    embedding = f"{config.names.embedding}.weight"
    if embedding not in checkpoint.tensors:
        return config
    return replace(config, names=replace(config.names, prefix=""))
