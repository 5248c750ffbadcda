"""`open_runner`: from a checkpoint's folder to a runner on a device."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncinfer.attention import KVCache
from asyncinfer.config import EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import Decoder, ModelConfig, load_model
from asyncinfer.runner.memory import plan_memory
from asyncinfer.runner.model_runner import ModelRunner
from asyncinfer.weights import OnProgress

__all__ = ["open_runner", "runner_of"]

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def open_runner(
    folder: str | Path,
    config: EngineConfig,
    vocab_size: int,
    progress: OnProgress | None = None,
) -> ModelRunner:
    """Load the checkpoint in `folder` and make room for its KV cache.

    Args:
        vocab_size: of the tokenizer: ids from there on are never drawn.
        progress: hears of each tensor loaded.

    Raises:
        ModelLoadError: the checkpoint cannot be loaded, or the device has no room.
        ValueError: `device`, `dtype`, `kv_bytes` or `max_context` cannot be.
    """
    device = _device(config.device)
    model = ModelConfig.from_folder(folder)
    dtype = _dtype(config.dtype, model, device)
    if vocab_size > model.vocab_size:
        raise ModelLoadError(
            f"the tokenizer has {vocab_size} tokens, the model's embedding {model.vocab_size}",
            file=str(folder),
        )
    return runner_of(load_model(folder, device, dtype, progress), config, vocab_size)


def runner_of(decoder: Decoder, config: EngineConfig, vocab_size: int) -> ModelRunner:
    """A runner of a decoder that is on its device already; raises like `open_runner`."""
    spec = plan_memory(config, decoder.config, decoder.dtype, decoder.device, vocab_size)
    try:
        kv = KVCache.allocate(
            decoder.config, spec.num_blocks, spec.block_size, decoder.dtype, decoder.device
        )
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's has no name
        raise ModelLoadError(
            f"{decoder.device} has no room for {spec.num_blocks} KV blocks: {error}"
        ) from error
    return ModelRunner(decoder, kv, spec)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: must be auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device={name!r}: must be auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None and count else device.index or 0
    if index >= count:
        raise ValueError(f"device={name!r}: there are {count} CUDA devices")
    return torch.device("cuda", index)


def _dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype or "bfloat16"
    if name not in _DTYPES:
        raise ValueError(f"dtype={name!r}: must be auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
