"""From a checkpoint's folder to a `ModelRunner`."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import KVCache, compile_native, use_flashinfer
from asyncinfer.config import HEAD, PREDICTOR, EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels.dispatch import KernelError, wants_triton
from asyncinfer.kernels.native import between_kernels
from asyncinfer.models import Decoder, load_model, read_config
from asyncinfer.models.eagle3 import Eagle3Head
from asyncinfer.models.layouts import weight_layouts
from asyncinfer.runner.accelerator import CudaAccelerator
from asyncinfer.runner.caches import allocate_caches
from asyncinfer.runner.canary import check_opened
from asyncinfer.runner.compile_ahead import compiling
from asyncinfer.runner.cpu_dtype import computes_in_bfloat16
from asyncinfer.runner.device import (
    check_attention,
    choose_attention,
    choose_device,
    choose_dtype,
    choose_graphs,
    choose_kernels,
    choose_kv,
    prepare_threads,
    trial_shapes,
)
from asyncinfer.runner.fallbacks import Fallbacks
from asyncinfer.runner.memory import for_drafts, plan_memory
from asyncinfer.runner.model_runner import ModelRunner
from asyncinfer.runner.step_memory import graph_hold
from asyncinfer.runner.step_threads import StepThreads
from asyncinfer.runner.tuning import choose_tuning
from asyncinfer.weights import OnProgress, WeightCache, is_out_of_memory
from asyncinfer.weights.gguf import is_gguf

__all__ = ["open_runner", "runner_of"]


def open_runner(
    folder: Path,
    config: EngineConfig,
    tokens: int,
    progress: OnProgress | None = None,
    *,
    draft: bool = False,
    head: Path | None = None,
) -> ModelRunner:
    """Load the model in `folder` and give it a KV cache. Call it on the thread that runs the model.

    Args:
        tokens: how many token ids the tokenizer knows; logits beyond are padding.
        progress: called for each tensor.
        draft: the model drafts for another one: it takes the share of memory that
            `for_drafts` gives, and has no streams of its own.
        head: the folder of a head that predicts further tokens.

    Raises `ModelLoadError`.
    """
    device = choose_device(config.device)
    kv = choose_kv(config.kv, device)
    if draft:
        config = for_drafts(config, device)
    prepare_threads(config, device)
    model = read_config(folder)
    halves = partial(computes_in_bfloat16, model, config)
    dtype = choose_dtype(config.dtype, model.dtype, device, halves)
    if tokens > model.vocab_size:
        raise ModelLoadError(
            f"token ids go up to {tokens - 1}, the model's embedding has {model.vocab_size} rows",
            file=str(folder if is_gguf(folder) else folder / "tokenizer.json"),
        )
    _, kv_dtype = kv.tensors(model.head_dim, dtype)[0]
    # Before weights take memory.
    layouts = weight_layouts(folder, model, config.weights) if device.type == "cuda" else ()
    check_attention(config, dtype, device)
    shapes = trial_shapes(model, dtype, kv_dtype, layouts)
    fault = choose_kernels(config, shapes, device)
    choose_tuning(config, model, shapes, device, draft=draft)
    config, attention_fault = choose_attention(config, shapes, device)
    # Pinned memory belongs to the thread's current device: any other one would get a CUDA context.
    with (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        compiling(folder, config, dtype, device, tokens, progress, head) as report,
    ):
        decoder = load_model(
            folder,
            device,
            dtype,
            report,
            max_context=config.max_context,
            storage=config.weights,
            predictor=config.draft == PREDICTOR,
            head=head,
            cache=_weight_cache(config, device),
        )
    if draft:
        # The draft model waits for each of its steps, on the stream of the large model's runner.
        return _runner(decoder, config, tokens, None, one_group=True)
    return runner_of(decoder, config, tokens, fault, attention_fault)


def _weight_cache(config: EngineConfig, device: torch.device) -> WeightCache | None:
    most = config.weight_cache_bytes
    return WeightCache(most) if most is not None and device.type == "cpu" else None


def _step_threads(device: torch.device) -> StepThreads | None:
    return StepThreads.here() if device.type == "cpu" else None


def _attended(decoder: Decoder, kv: KVCache) -> tuple[int, float]:
    """The query heads of the layers with these pages, and the factor of their scores."""
    head = decoder.predictor
    if isinstance(head, Eagle3Head) and head.layer in kv.layers:
        return head.heads, head.scale
    return decoder.config.num_heads, decoder.config.query_scale


def runner_of(
    decoder: Decoder,
    config: EngineConfig,
    tokens: int,
    fault: str | None = None,
    attention_fault: str | None = None,
) -> ModelRunner:
    """A runner of a decoder that is on its device already, for this thread, whose GPU work uses a
    stream of its own from now on. The faults are those of `choose_kernels` and `choose_attention`.
    Raises `ModelLoadError`."""
    faults = fault, attention_fault
    if decoder.device.type != "cuda":
        return _runner(decoder, config, tokens, None, faults=faults)
    accelerator = CudaAccelerator(decoder.device)
    accelerator.adopt()
    try:
        return _runner(decoder, config, tokens, accelerator, faults=faults)
    except BaseException:
        accelerator.drain()
        accelerator.close()
        raise


def _runner(
    decoder: Decoder,
    config: EngineConfig,
    tokens: int,
    accelerator: CudaAccelerator | None,
    *,
    one_group: bool = False,
    faults: tuple[str | None, str | None] = (None, None),
) -> ModelRunner:
    kv_format, beside = choose_kv(config.kv, decoder.device), decoder.config.head_kv is not None
    predicts = PREDICTOR if decoder.config.predicts else HEAD if beside else ""
    if decoder.config.indexed is not None:
        # Sparse attention reads lengths on the host.
        config = config.replace(cuda_graphs="off")
    spec = plan_memory(
        config, decoder.config, decoder.dtype, decoder.device, tokens, one_group=one_group
    )
    spec = dataclasses.replace(spec, hidden_size=decoder.config.hidden_size, predicts=predicts)
    if spec.max_context != decoder.max_context:
        # Fewer tokens fit than were asked for, and LongRoPE's factors depend on how many.
        decoder.keep_within(spec.max_context)
    try:
        caches = [allocate_caches(decoder, group, spec, kv_format) for group in spec.groups]
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        raise ModelLoadError(
            f"{decoder.device} has no room for {spec.num_blocks} KV blocks: {error}"
        ) from error
    kv = [cache for group in caches for cache in group]
    groups = [number for number, group in enumerate(caches) for _ in group]
    if decoder.device.type == "cpu":
        # Compiled now, so that no step waits for it.
        between_kernels(decoder.dtype)
    for cache in kv:
        if isinstance(cache, KVCache) and not config.deterministic:
            compile_native(cache, *_attended(decoder, cache))
    fallbacks = Fallbacks()
    kernel_fault, attention_fault = faults
    if kernel_fault is not None:
        fallbacks.add("kernels", kernel_fault)
    if attention_fault is not None:
        fallbacks.add("attention", attention_fault)
    if decoder.config.lacking is not None:
        fallbacks.add("products", decoder.config.lacking)
    try:
        if config.attention == "flashinfer":
            use_flashinfer(kv)
        runner = ModelRunner(
            decoder,
            kv,
            spec,
            sampler_timeout=config.sampler_timeout,
            accelerator=accelerator,
            graphs=choose_graphs(config, kv, groups, fallbacks, predicts=bool(predicts))
            if accelerator is not None
            else config.cuda_graphs,
            graph_memory=graph_hold(config, decoder.config, decoder.dtype),
            deterministic=config.deterministic,
            # The last bits of a sum depend on how many threads share it.
            threads=None if config.deterministic or one_group else _step_threads(decoder.device),
            fallbacks=fallbacks,
            groups=groups,
            adapters=AdapterPool(
                decoder.config,
                decoder.device,
                decoder.dtype,
                max_adapters=config.max_adapters,
                max_rank=config.max_adapter_rank,
                max_bytes=config.adapter_bytes,
                warm_up=config.warm_up and decoder.device.type == "cuda" and wants_triton(),
            ),
        )
        if accelerator is not None:
            check_opened(runner, config)
        return runner
    except KernelError as error:
        # A deterministic runner has no fallbacks, and tries its tiles when it is created.
        raise ModelLoadError(f"{error}: see `asyncinfer doctor`") from error
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ModelLoadError(
            f"{decoder.device} has no room for steps of {spec.max_slots} requests: {error}"
        ) from error
