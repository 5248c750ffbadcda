"""`plan`: what a model takes on a GPU, and how fast it can be there, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from asyncinfer.checks import check_integer
from asyncinfer.config import EngineConfig
from asyncinfer.errors import InvalidRequest
from asyncinfer.models import ModelConfig, parse_config
from asyncinfer.planner.floors import Floor, Speed, Storage, decode_floor, prefill_floor
from asyncinfer.planner.formats import DTYPE_BYTES, FORMATS, Format
from asyncinfer.planner.gpus import Gpu, find_gpu
from asyncinfer.planner.kv_capacity import KVCapacity, kv_capacity
from asyncinfer.planner.size import ModelSize
from asyncinfer.runner.memory import GPU_OVERLAP, activation_bytes, graph_bytes
from asyncinfer.weights import read_json, resolve_config

__all__ = ["FormatPlan", "Limit", "Plan", "plan", "plan_config"]

Limit = Literal["compute", "bandwidth", "capacity"]

#: What good engines reach of a GPU's nominal bandwidth in decode steps, and of its nominal
#: arithmetic in prefill, on models of some billion parameters; small ones reach less.
_DECODE_SHARE: Final = 0.7
_PREFILL_SHARE: Final = 0.5
_DEFAULT_CONTEXT: Final = 4096
_MOST_BATCH: Final = 1 << 20
_MOST_CONFIG_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatPlan:
    """The plan with the weights, or the KV, in one format."""

    format: str
    #: Bytes of all weights in memory.
    weight_bytes: int
    #: Of a token's keys and values, over all layers.
    kv_bytes_per_token: int
    #: Of each token after `context`: a layer whose window is full gives as much back as it takes.
    kv_bytes_per_further_token: int
    #: What a sequence of `context` tokens holds, in whole blocks.
    kv_bytes_per_sequence: int
    #: What layers with a window hold for the query tokens in flight, of all sequences together.
    kv_bytes_in_flight: int
    #: What a decode step reads, and writes, of the keys and values of each sequence.
    kv_bytes_read: int
    #: How many sequences of `context` tokens run at once in the memory beside the weights.
    sequences: int
    #: Least seconds of a decode step of `batch` sequences with `context` tokens each.
    decode_floor: float
    #: Least seconds of the prefill of `context` tokens.
    prefill_floor: float
    #: What to expect of decode steps, over all sequences that run at once: `batch`, or as many as
    #: fit.
    decode_tokens_per_second: float
    #: The same with as many sequences as fit.
    most_tokens_per_second: float
    prefill_tokens_per_second: float
    #: What limits a decode step: "capacity" if the batch does not fit, else arithmetic or
    #: bandwidth.
    limit: Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `plan` found."""

    architecture: str
    parameters: int
    #: Of these, what one token is multiplied with: without an embedding that is only looked up,
    #: and without the experts it is not sent to.
    active_parameters: int
    gpu: Gpu
    #: Bytes and operations a second that floors were computed with.
    bandwidth: float
    flops: float
    context: int
    batch: int
    dtype: str
    #: The model as it is, then with smaller formats.
    formats: tuple[FormatPlan, ...]
    size: ModelSize

    def decode_floors(self, batches: tuple[int, ...]) -> tuple[Floor, ...]:
        """The floor of a decode step with the model as it is, for other numbers of sequences."""
        speed = Speed(bandwidth=self.bandwidth, flops=self.flops)
        storage = Format(name=self.dtype).storage(self.dtype, self.size.head_dim)
        return tuple(
            decode_floor(self.size, speed, batch=batch, context=self.context, storage=storage)
            for batch in batches
        )


def plan(
    model: str | Path,
    *,
    gpu: str | Gpu = "h200",
    context: int | None = None,
    batch: int = 1,
    dtype: str = "auto",
    nominal: bool = False,
    revision: str | None = None,
    offline: bool = False,
) -> Plan:
    """Plan for `model`: a folder, a `config.json`, or a hub id, of which only `config.json` is
    fetched.

    Args:
        gpu: a name of `gpus()`, or a `Gpu` of your own.
        context: tokens of each sequence; None: 4,096, or the model's own if that is less.
        batch: sequences in a decode step.
        dtype: "auto" takes the checkpoint's, bfloat16 where it does not say.
        nominal: compute floors with the maker's figures even where there are measured ones.
        revision: branch, tag or commit of a hub id.
        offline: take what the hub's cache holds.

    Raises `InvalidRequest` for an option that cannot be, `ModelLoadError` for a config that is not
    there or that the engine cannot load.
    """
    chosen = find_gpu(gpu) if isinstance(gpu, str) else gpu
    path = resolve_config(model, revision=revision, offline=offline)
    config = parse_config(read_json(path, _MOST_CONFIG_BYTES), file=str(path))
    return plan_config(
        config, gpu=chosen, context=context, batch=batch, dtype=dtype, nominal=nominal
    )


def plan_config(
    config: ModelConfig,
    *,
    gpu: Gpu,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "auto",
    nominal: bool = False,
) -> Plan:
    """`plan` for a config that has been read."""
    if context is None:
        context = min(_DEFAULT_CONTEXT, config.max_context)
    check_integer("context", context, 1, config.max_context)
    check_integer("batch", batch, 1, _MOST_BATCH)
    if dtype == "auto":
        dtype = config.dtype or "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise InvalidRequest("dtype", dtype, f"must be auto or one of {', '.join(DTYPE_BYTES)}")
    size = ModelSize.of(config)
    # The kernels read fp8 KV only on GPUs with fp8 units.
    supported = (one for one in FORMATS if one.kv != "fp8" or gpu.fp8)
    formats = (Format(name=dtype), *supported)
    speed = formats[0].speed(gpu, dtype, nominal=nominal)
    return Plan(
        architecture=config.architecture,
        parameters=size.parameters,
        active_parameters=round(size.layer_parameters + size.head_parameters),
        gpu=gpu,
        bandwidth=speed.bandwidth,
        flops=speed.flops,
        context=context,
        batch=batch,
        dtype=dtype,
        formats=tuple(
            _plan_format(one, config, size, gpu, dtype, nominal, context, batch) for one in formats
        ),
        size=size,
    )


def _plan_format(
    format: Format,
    config: ModelConfig,
    size: ModelSize,
    gpu: Gpu,
    dtype: str,
    nominal: bool,
    context: int,
    batch: int,
) -> FormatPlan:
    storage = format.storage(dtype, size.head_dim)
    speed, promised = (format.speed(gpu, dtype, nominal=flag) for flag in (nominal, True))
    capacity = _capacity(storage, config, size, gpu, context, getattr(torch, dtype))
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
        kv_bytes_per_further_token=storage.kv_bytes(size, capacity.layers),
        kv_bytes_per_sequence=capacity.per_sequence,
        kv_bytes_in_flight=capacity.in_flight,
        kv_bytes_read=storage.kv_bytes(size, size.tokens_read(context + 1)),
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
    gpu: Gpu,
    context: int,
    dtype: torch.dtype,
) -> KVCapacity:
    """The KV capacity of an engine with default options."""
    engine = EngineConfig(max_context=context)
    memory = gpu.memory - storage.weight_bytes(size)

    def free(slots: int) -> int:
        sized = engine.replace(max_running=slots)
        beside = activation_bytes(sized, config, dtype) + graph_bytes(sized, config, dtype)
        return max(0, int(engine.kv_fraction * (memory - beside)))

    return kv_capacity(config, engine, storage.kv_bytes(size, engine.block_size), free, GPU_OVERLAP)
