"""`FormatPlan`: the memory and the speed of a model on a GPU in one format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

from asyncinfer.config import EngineConfig
from asyncinfer.models import ModelConfig
from asyncinfer.planner.floors import Storage, decode_floor, prefill_floor
from asyncinfer.planner.formats import Format
from asyncinfer.planner.gpus import Gpu
from asyncinfer.planner.kv_capacity import KVCapacity, kv_capacity
from asyncinfer.planner.size import ModelSize
from asyncinfer.runner.memory import GPU_OVERLAP, state_bytes
from asyncinfer.runner.step_memory import activation_bytes, graph_bytes

__all__ = ["FormatPlan", "Limit", "plan_format"]

Limit = Literal["compute", "bandwidth", "capacity"]

#: The shares of a GPU's nominal bandwidth in decode steps, and of its nominal arithmetic in
#: prefill, that good engines reach on models of some billion parameters; small models reach less.
_DECODE_SHARE: Final = 0.7
_PREFILL_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatPlan:
    """The plan with weights or KV in one format."""

    format: str
    #: Bytes of all weights in memory.
    weight_bytes: int
    #: Bytes of a token's keys and values, over all layers.
    kv_bytes_per_token: int
    #: The same for each token after `context`: a layer whose window is full takes no more.
    kv_bytes_per_further_token: int
    #: Bytes that a sequence of `context` tokens holds, in whole blocks.
    kv_bytes_per_sequence: int
    #: Bytes that layers with a window hold for query tokens in flight, in all sequences together.
    kv_bytes_in_flight: int
    #: Bytes of the states that a sequence of `context` tokens leaves for prefix hits, one after
    #: every `state_interval` blocks. Older states are evicted when they do not fit.
    state_bytes_kept: int
    #: Bytes of each sequence's keys and values that a decode step reads and writes.
    kv_bytes_read: int
    #: How many sequences of `context` tokens run at once in the memory beside the weights.
    sequences: int
    #: The least seconds of a decode step of `batch` sequences with `context` tokens each.
    decode_floor: float
    #: The least seconds of the prefill of `context` tokens.
    prefill_floor: float
    #: Expected decode tokens a second, over all running sequences: `batch`, or as many as fit.
    decode_tokens_per_second: float
    #: The same with as many sequences as fit.
    most_tokens_per_second: float
    prefill_tokens_per_second: float
    #: The limit of a decode step: "capacity" if the batch does not fit, else arithmetic or
    #: bandwidth.
    limit: Limit


def plan_format(
    format: Format,
    config: ModelConfig,
    size: ModelSize,
    gpu: Gpu,
    dtype: str,
    nominal: bool,
    context: int,
    batch: int,
    beside: int,
    state_interval: int = 1,
) -> FormatPlan:
    """The plan in `format`, with `beside` bytes set aside for adapters and a draft model."""
    engine = EngineConfig(max_context=context, state_interval=state_interval)
    storage = format.storage(dtype, size.head_dim)
    speed, promised = (format.speed(gpu, dtype, nominal=flag) for flag in (nominal, True))
    memory = gpu.memory - storage.weight_bytes(size) - beside
    capacity = _capacity(storage, config, size, memory, engine, getattr(torch, dtype))
    fit = capacity.sequences
    floor = decode_floor(size, speed, batch=batch, context=context, storage=storage)
    prefill = prefill_floor(size, speed, tokens=context, storage=storage)

    def expected(sequences: int) -> float:
        if not sequences:
            return 0.0
        step = decode_floor(size, promised, batch=sequences, context=context, storage=storage)
        return _DECODE_SHARE * sequences / step.seconds

    limit: Limit = "compute" if floor.compute_bound else "bandwidth"
    prompt = prefill_floor(size, promised, tokens=context, storage=storage).seconds
    return FormatPlan(
        format=format.name,
        weight_bytes=storage.weight_bytes(size),
        kv_bytes_per_token=storage.kv_bytes_per_token(size),
        kv_bytes_per_further_token=storage.kv_bytes(
            sum(size.kv_elements[layer] for layer in capacity.layers)
        ),
        kv_bytes_per_sequence=capacity.per_sequence,
        kv_bytes_in_flight=capacity.in_flight,
        state_bytes_kept=context
        // (engine.block_size * state_interval)
        * state_bytes(config, getattr(torch, dtype)),
        kv_bytes_read=storage.kv_bytes(size.kv_read(context + 1)),
        sequences=fit,
        decode_floor=floor.seconds,
        prefill_floor=prefill.seconds,
        decode_tokens_per_second=expected(min(batch, fit)),
        most_tokens_per_second=expected(fit),
        prefill_tokens_per_second=_PREFILL_SHARE * context / prompt if fit else 0.0,
        limit=limit if batch <= fit else "capacity",
    )


def _capacity(
    storage: Storage,
    config: ModelConfig,
    size: ModelSize,
    memory: float,
    engine: EngineConfig,
    dtype: torch.dtype,
) -> KVCapacity:
    """The KV capacity of an engine with these options, in `memory` bytes besides weights, adapters
    and a draft model."""

    def free(slots: int) -> int:
        sized = engine.replace(max_running=slots)
        beside = activation_bytes(sized, config, dtype) + graph_bytes(sized, config, dtype)
        return max(0, int(engine.kv_fraction * (memory - beside)))

    layer_bytes = [storage.kv_bytes(each * engine.block_size) for each in size.kv_elements]
    states = state_bytes(config, dtype)
    return kv_capacity(config, engine, layer_bytes, free, GPU_OVERLAP, states)
