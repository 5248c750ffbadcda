"""From a checkpoint's folder to a `ModelRunner`."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncinfer.attention import KVCache
from asyncinfer.config import EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import ModelConfig, load_model
from asyncinfer.runner.device import choose_device, choose_dtype
from asyncinfer.runner.memory import count_blocks
from asyncinfer.runner.model_runner import ModelRunner
from asyncinfer.scheduler import RunnerSpec
from asyncinfer.weights import OnProgress

__all__ = ["open_runner"]


def open_runner(
    folder: Path, config: EngineConfig, tokens: int, progress: OnProgress | None = None
) -> ModelRunner:
    """Load the model in `folder` and give it a KV cache.

    Args:
        tokens: how many token ids the tokenizer knows; logits beyond are padding.

    Raises `ModelLoadError`.
    """
    model = ModelConfig.from_folder(folder)
    if tokens > model.vocab_size:
        raise ModelLoadError(
            f"the tokenizer has token ids up to {tokens - 1}, the embedding {model.vocab_size} rows",
            file=str(folder / "tokenizer.json"),
        )
    context = model.max_context if config.max_context is None else config.max_context
    if context > model.max_context:
        raise ModelLoadError(f"max_context={context}: the model has {model.max_context}")
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, model.dtype, device)
    decoder = load_model(folder, device, dtype, progress)
    blocks = count_blocks(config, model, dtype, device)
    try:
        kv = KVCache.allocate(model, blocks, config.block_size, dtype, device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise ModelLoadError(f"{device} has no room for {blocks} KV blocks: {error}") from error
    spec = RunnerSpec(
        num_blocks=blocks,
        block_size=config.block_size,
        max_slots=config.max_running,
        max_context=context,
        vocab_size=tokens,
        max_step_tokens=config.max_step_tokens,
    )
    return ModelRunner(decoder, kv, spec)
