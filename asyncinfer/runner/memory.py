"""The memory plan of a runner: the size of the KV cache, and the limits that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncinfer.attention import PLAIN, KVCache, KVFormat, kv_format
from asyncinfer.cache import STATE_WINDOW, KVGroupSpec, reach_of, steady_pages
from asyncinfer.config import LEAST_CONTEXT, EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import ModelConfig
from asyncinfer.runner.step_memory import activation_bytes, graph_bytes
from asyncinfer.runner.unmet import check_options
from asyncinfer.scheduler import FULL_STEPS, RunnerSpec

__all__ = [
    "DRAFT_GPU_BYTES",
    "GPU_OVERLAP",
    "for_drafts",
    "kv_layer_bytes",
    "pages_in_flight",
    "plan_memory",
    "share_out",
    "share_states",
    "state_bytes",
]

#: Default KV cache of a CPU engine: the system commits a page at its first use.
_CPU_BYTES = 1 << 30
#: Default of `step_target` on a CPU: ten tokens a second are about reading speed.
_CPU_STEP_TARGET = 0.1
#: The KV of a draft model: a share of `kv_bytes`, and what it takes where that is not given.
_DRAFT_SHARE = 8
_DRAFT_CPU_BYTES = 1 << 27
DRAFT_GPU_BYTES = 1 << 30
#: Default of the most steps in flight on a GPU: see `asyncinfer.scheduler.Pace`.
GPU_OVERLAP = 8


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    vocab_size: int,
    *,
    one_group: bool = False,
) -> RunnerSpec:
    """The limits of a runner of `model`. Call it when the weights are on the device.

    The KV cache takes `config.kv_bytes`; else `kv_fraction` of what is free beside the
    activations of the largest step and what recorded steps need (1 GiB on a CPU), but no more than
    fills every slot's context. A context that was not asked for shrinks to what fits. Layers with
    a window may be a KV group of their own, unless there is to be `one_group`: see `share_out`.
    Those with a state are: see `share_states`.

    Raises `ModelLoadError`: the device has no room beside the weights, or the options cannot be
    met: `max_context` is beyond the model's or does not fit the cache, `kv_bytes` hold no block.
    """
    size = config.block_size
    context = config.max_context or model.max_context
    if context > model.max_context:
        raise ModelLoadError(f"max_context={context}: this model's is {model.max_context}")
    check_options(config, model, device, one_group)
    bound = "the model's" if config.max_context is None else f"max_context={config.max_context}"
    if model.bidirectional and context > config.max_step_tokens:
        context = config.max_step_tokens
        bound = f"max_step_tokens={context}: this model takes a text in one step"
    layer_bytes = kv_layer_bytes(model, size, dtype, kv_format(config.kv))
    block_bytes = sum(layer_bytes)
    most = config.max_running * -(-context // size)
    if config.kv_bytes is not None:
        room, free = f"kv_bytes={config.kv_bytes}", config.kv_bytes
        blocks = free // max(1, block_bytes)
    else:
        free = _free_bytes(config, model, dtype, device)
        room = f"{free} bytes free on {device} beside the weights"
        if device.type == "cpu":
            room = f"kv_bytes={free}, what a CPU takes unless it is told"
        blocks = min(free // max(1, block_bytes), most)
    target = config.step_target
    if target is None and device.type == "cpu":
        target = _CPU_STEP_TARGET
    overlap = config.overlap or (GPU_OVERLAP if device.type == "cuda" else 1)
    groups: tuple[KVGroupSpec, ...] = (KVGroupSpec(blocks, layers=model.kv_layers),)
    in_flight = pages_in_flight(config, overlap)
    if model.bidirectional:
        groups = (KVGroupSpec(most),)
    elif model.state_layers:
        page_bytes = state_bytes(model, dtype)
        groups = share_states(free, model, config, layer_bytes, page_bytes, config.max_running)
        if groups[1].num_pages < steady_pages(STATE_WINDOW, size):
            raise ModelLoadError(
                f"{room}: a state takes {state_bytes(model, dtype)} bytes, and a request goes on "
                f"with {steady_pages(STATE_WINDOW, size)} of them"
            )
    elif model.window is not None and not one_group:
        divided = share_out(free, context, model, layer_bytes, size, config.max_running, in_flight)
        groups = divided or groups
    blocks = groups[0].num_pages
    if blocks < 1:
        raise ModelLoadError(f"{room}: one KV block of {size} tokens takes {block_bytes} bytes")
    held = blocks * size
    if held < context:
        if config.max_context is not None:
            raise ModelLoadError(
                f"{room}: the KV of max_context={context} takes "
                f"{-(-context // size) * block_bytes} bytes"
            )
        context = held
        bound = f"{room} holds no more; the model's is {model.max_context}"
    if context < LEAST_CONTEXT:
        raise ModelLoadError(
            f"a context of {context} tokens ({bound}): a token of a prompt and one of an answer "
            f"take {LEAST_CONTEXT}"
        )
    return RunnerSpec(
        groups=groups,
        block_size=size,
        max_slots=config.max_running,
        max_context=context,
        vocab_size=vocab_size,
        max_step_tokens=config.max_step_tokens,
        step_target=target,
        samplers=True,
        masks=True,
        drafts=True,
        guides=True,
        whole_prompts=model.bidirectional,
        overlap=overlap,
        context_bound=bound,
    )


def for_drafts(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The options of a draft model in an engine of these: an eighth of `kv_bytes` for its KV, else
    128 MiB on a CPU and 1 GiB on a GPU; no adapters, and a context of its own."""
    if config.kv_bytes is not None:
        held = max(1, config.kv_bytes // _DRAFT_SHARE)
    else:
        held = _DRAFT_CPU_BYTES if device.type == "cpu" else DRAFT_GPU_BYTES
    return config.replace(
        kv_bytes=held,
        max_context=None,
        max_adapters=0,
        adapter_bytes=None,
        cuda_graphs="off",
        attention="auto",
        deterministic=False,
    )


def pages_in_flight(config: EngineConfig, overlap: int) -> int:
    """Window pages of the query tokens of `overlap` steps: `Pace` lets no more be in flight than
    `FULL_STEPS` full ones have, but for the decode steps that a CPU queues."""
    return -(-min(overlap, FULL_STEPS) * config.max_step_tokens // config.block_size)


def kv_layer_bytes(
    model: ModelConfig, size: int, dtype: torch.dtype, format: KVFormat = PLAIN
) -> tuple[int, ...]:
    """Bytes of a block of `size` tokens in each layer; 0 for a layer without KV of its own. The
    last entry may be that of a drafting head."""
    return tuple(
        KVCache.bytes_per_block(model.layer_kv(index), size, dtype, format)
        if index in model.kv_layers
        else 0
        for index in range(model.num_layers + (model.head_kv is not None))
    )


def state_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one page of states: what all layers that have one keep of a sequence."""
    return len(model.state_layers) * sum(each.bytes(dtype) for each in model.state)


def share_states(
    free: int,
    model: ModelConfig,
    config: EngineConfig,
    layer_bytes: Sequence[int],
    page_bytes: int,
    slots: int,
) -> tuple[KVGroupSpec, ...]:
    """Divide `free` bytes between KV and states.

    If a page of states is no larger than a block, there are as many pages as blocks, so that a
    prefix hit may end at any block. Larger pages take half of the bytes. With a `state_interval`
    there are only the pages that it keeps, and those that running requests use. If the context is
    short, there may be more pages than blocks, since running requests need them.

    Args:
        free: bytes.
        layer_bytes: of a block in each layer.
        page_bytes: of a page of states.
        slots: most requests at once.
    """
    far, interval = model.kv_layers, config.state_interval
    most = slots * -(-(config.max_context or model.max_context) // config.block_size)
    block_bytes = sum(layer_bytes)
    halved = 0 < block_bytes < page_bytes
    pages = free // 2 // page_bytes if halved else free // (block_bytes + page_bytes)
    if interval > 1:
        kept = free // (interval * block_bytes + page_bytes)
        pages = min(pages, kept + slots * steady_pages(STATE_WINDOW, config.block_size))
    pages = min(pages, max(most, steady_pages(STATE_WINDOW, 1)))
    blocks = most if not block_bytes else min((free - pages * page_bytes) // block_bytes, most)
    return (
        KVGroupSpec(blocks, layers=far),
        KVGroupSpec(pages, STATE_WINDOW, model.state_layers, state=True, interval=interval),
    )


def share_out(
    free: int,
    context: int,
    model: ModelConfig,
    layer_bytes: Sequence[int],
    size: int,
    slots: int,
    in_flight: int,
) -> tuple[KVGroupSpec, ...]:
    """Divide `free` bytes between two groups, the layers that see everything and those with a
    window. Empty if a second group does not pay: the context, or what of it fits, is hardly longer
    than the window.

    A request never holds more pages than its window spans and its tokens in flight, so pages for
    that in every slot are the most there need be; what a prefix's hits need is in what slots leave
    over. Where the bytes do not suffice, there are as many pages as sequences of four windows, or
    of the whole context if that is less, take beside their blocks, and never more than if every
    layer kept everything: there are always at least as many blocks as then. A whole context comes
    first. Where every layer has a window, blocks take no bytes: there are as many as fill every
    slot, and the rest is pages.

    Args:
        free: bytes.
        layer_bytes: of a block in each layer.
        slots: most requests at once.
        in_flight: pages of the query tokens in flight, of all requests together.
    """
    assert model.window is not None
    width = -(-context // size)
    reach, steady = reach_of(model.window, size), steady_pages(model.window, size)
    near = tuple(layer for layer in model.kv_layers if layer in model.windowed_layers)
    far = tuple(layer for layer in model.kv_layers if layer not in near)
    page_bytes = sum(layer_bytes[layer] for layer in near)
    block_bytes = sum(layer_bytes[layer] for layer in far)
    most = slots * width
    if not block_bytes:
        blocks, pages = most, min(free // page_bytes, most)
    else:
        typical = min(4 * max(reach, 1), width) * block_bytes + steady * page_bytes
        pages = min(
            most,
            slots * steady + in_flight,
            free // typical * steady + in_flight,
            free // (block_bytes + page_bytes),
        )
        pages = min(pages, max((free - width * block_bytes) // page_bytes, steady + 1))
        blocks = min((free - pages * page_bytes) // block_bytes, most)
    pays = steady + 1 < min(width, blocks) and pages > steady
    if not pays:
        return ()
    return KVGroupSpec(blocks, layers=far), KVGroupSpec(pages, model.window, near)


def _free_bytes(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    if device.type == "cpu":
        return _CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that torch has reserved and does not use is free for the cache.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free -= activation_bytes(config, model, dtype) + graph_bytes(config, model, dtype)
    free -= config.adapter_bytes or 0
    return int(config.kv_fraction * max(0, free))
