"""From a checkpoint's folder to a `ModelRunner`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from asyncinfer.attention import KVCache, reads_pages
from asyncinfer.config import EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import Decoder, load_model, read_config
from asyncinfer.runner.accelerator import CudaAccelerator
from asyncinfer.runner.device import (
    choose_device,
    choose_dtype,
    choose_kv,
    use_cpu_threads,
)
from asyncinfer.runner.memory import graph_hold, plan_memory
from asyncinfer.runner.model_runner import ModelRunner
from asyncinfer.weights import OnProgress, is_out_of_memory

__all__ = ["open_runner", "runner_of"]


def open_runner(
    folder: Path, config: EngineConfig, tokens: int, progress: OnProgress | None = None
) -> ModelRunner:
    """Load the model in `folder` and give it a KV cache. To be called on the thread that runs it.

    Args:
        tokens: how many token ids the tokenizer knows; logits beyond are padding.
        progress: hears of each tensor.

    Raises `ModelLoadError`.
    """
    device = choose_device(config.device)
    choose_kv(config.kv, device)
    if config.cpu_threads is not None:
        use_cpu_threads(config.cpu_threads)
    model = read_config(folder)
    dtype = choose_dtype(config.dtype, model.dtype, device)
    if tokens > model.vocab_size:
        raise ModelLoadError(
            f"token ids go up to {tokens - 1}, the model's embedding has {model.vocab_size} rows",
            file=str(folder / "tokenizer.json"),
        )
    # Pinned memory goes by the thread's device: another's would be woken for it.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        decoder = load_model(
            folder,
            device,
            dtype,
            progress,
            max_context=config.max_context,
            storage=config.weights,
        )
    return runner_of(decoder, config, tokens)


def runner_of(decoder: Decoder, config: EngineConfig, tokens: int) -> ModelRunner:
    """A runner of a decoder that is on its device already, for this thread, whose work on a GPU
    goes to a stream of its own from now on. Raises `ModelLoadError`."""
    if decoder.device.type != "cuda":
        return _runner(decoder, config, tokens, None)
    accelerator = CudaAccelerator(decoder.device)
    accelerator.adopt()
    try:
        return _runner(decoder, config, tokens, accelerator)
    except BaseException:
        accelerator.drain()
        accelerator.close()
        raise


def _runner(
    decoder: Decoder, config: EngineConfig, tokens: int, accelerator: CudaAccelerator | None
) -> ModelRunner:
    kv_format = choose_kv(config.kv, decoder.device)
    spec = plan_memory(config, decoder.config, decoder.dtype, decoder.device, tokens)
    if spec.max_context != decoder.max_context:
        # Fewer fit than were asked for, and which rotation is right may depend on it.
        decoder.keep_within(spec.max_context)
    try:
        kv = [
            KVCache.allocate(
                decoder.config,
                group.num_pages,
                spec.block_size,
                decoder.dtype,
                decoder.device,
                format=kv_format,
                layers=group.layers,
            )
            for group in spec.groups
        ]
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's has no name
        raise ModelLoadError(
            f"{decoder.device} has no room for {spec.num_blocks} KV blocks: {error}"
        ) from error
    try:
        return ModelRunner(
            decoder,
            kv,
            spec,
            sampler_timeout=config.sampler_timeout,
            accelerator=accelerator,
            # Torch's own attention reads the whole width of every table when it is recorded.
            graphs=config.cuda_graphs if all(map(reads_pages, kv)) else "off",
            graph_memory=graph_hold(config, decoder.config, decoder.dtype),
            deterministic=config.deterministic,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ModelLoadError(
            f"{decoder.device} has no room for steps of {spec.max_slots} requests: {error}"
        ) from error
