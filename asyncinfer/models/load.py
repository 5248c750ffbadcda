"""From a checkpoint's folder to a `Decoder` on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from asyncinfer.errors import ModelLoadError
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.config_file import read_config
from asyncinfer.models.decoder import Decoder
from asyncinfer.models.tensors import ignored_tensor, tensor_table
from asyncinfer.weights import (
    Checkpoint,
    OnProgress,
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
    """Load the checkpoint in `folder`, its weights converted to `dtype`, for sequences of at most
    `max_context` tokens (None: as many as the model was made for), the layers' matrices held as
    `make_linear`'s `storage` names.

    Weights stream onto the device one tensor at a time; `progress` hears of each. Raises
    `ModelLoadError`, before any device memory is taken, for whatever the files say that cannot be.
    """
    with _opened(folder, device, dtype, progress) as (config, weights):
        return Decoder(config, weights, max_context, storage)


def load_weights(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors that `load_model` makes its decoder of, by the names of `tensor_table`, which a
    device has not laid out for its matrix products yet. Raises as that does."""
    with _opened(folder, device, dtype, progress) as (config, weights):
        return {name: weights(name) for name in tensor_table(config)}


@contextmanager
def _opened(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None,
) -> Iterator[tuple[ModelConfig, WeightSource]]:
    """The config and the source of the weights, each to be asked for inside."""
    config = read_config(folder)
    kind = GgufCheckpoint if is_gguf(Path(folder)) else Checkpoint
    with kind(folder) as checkpoint, torch.inference_mode():
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


def without_prefix(config: ModelConfig, checkpoint: TensorFiles) -> ModelConfig:
    """The config for a checkpoint whose tensors lack the architecture's prefix, which is what the
    model without its head is saved as."""
    prefix = config.names.prefix
    if any(name.startswith(prefix) for name in checkpoint.tensors):
        return config
    embedding = f"{config.names.embedding}.weight"
    if embedding not in checkpoint.tensors:
        return config
    return replace(config, names=replace(config.names, prefix=""))
