"""`plan`: what a model takes on a GPU, and how fast it can be there, from its config or its header
alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from asyncinfer.adapters import lora_layout
from asyncinfer.checks import check_integer
from asyncinfer.config import MOST_ADAPTER_RANK, MOST_ADAPTERS, EngineConfig
from asyncinfer.errors import InvalidRequest
from asyncinfer.models import ModelConfig, parse_config, read_config
from asyncinfer.planner.floors import Floor, Speed, Storage, decode_floor, prefill_floor
from asyncinfer.planner.formats import DTYPE_BYTES, FORMATS, Format
from asyncinfer.planner.gpus import Gpu, find_gpu
from asyncinfer.planner.kv_capacity import KVCapacity, kv_capacity
from asyncinfer.planner.size import ModelSize
from asyncinfer.planner.stored import StoredType, quantised_types, stored_format, stored_types
from asyncinfer.runner.memory import (
    DRAFT_GPU_BYTES,
    GPU_OVERLAP,
    activation_bytes,
    graph_bytes,
    state_bytes,
)
from asyncinfer.weights import read_json, resolve_config
from asyncinfer.weights.gguf import is_gguf

__all__ = ["FormatPlan", "Limit", "Plan", "config_of", "plan", "plan_config"]

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
    #: Bytes of a token's keys and values, over all layers.
    kv_bytes_per_token: int
    #: The same of each token after `context`: a layer with a full window takes no more bytes.
    kv_bytes_per_further_token: int
    #: Bytes that a sequence of `context` tokens holds, in whole blocks.
    kv_bytes_per_sequence: int
    #: Bytes that layers with a window hold for query tokens in flight, of all sequences together.
    kv_bytes_in_flight: int
    #: Bytes of each sequence's keys and values that a decode step reads and writes.
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
    """The result of `plan`."""

    architecture: str
    parameters: int
    #: The parameters that one token is multiplied with: without an embedding that is only looked
    #: up, and without the experts it is not sent to.
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
    #: Set aside for LoRA adapters.
    adapter_bytes: int = 0
    #: What a draft model takes in the first of the formats: its weights, its KV and its steps.
    draft_bytes: int = 0
    #: The types of the tensors of a GGUF file or a quantised checkpoint; empty for other models.
    stored: tuple[StoredType, ...] = ()

    def decode_floors(self, batches: tuple[int, ...]) -> tuple[Floor, ...]:
        """The floor of a decode step with the model as it is, for other numbers of sequences."""
        speed = Speed(bandwidth=self.bandwidth, flops=self.flops)
        format = stored_format(self.stored) if self.stored else Format(name=self.dtype)
        storage = format.storage(self.dtype, self.size.head_dim)
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
    adapters: int = 0,
    adapter_rank: int | None = None,
    draft: str | Path | None = None,
    revision: str | None = None,
    offline: bool = False,
) -> Plan:
    """Plan for `model`: a folder, a `config.json`, or a hub id, of which only `config.json` is
    fetched; or a model in GGUF that is here already, of which only the header is read.

    Args:
        gpu: a name of `gpus()`, or a `Gpu` of your own.
        context: tokens of each sequence; None: 4,096, or the model's own if that is less.
        batch: sequences in a decode step.
        dtype: "auto" takes the checkpoint's, bfloat16 where it does not say.
        nominal: compute floors with the maker's figures even where there are measured ones.
        adapters: LoRA adapters of all projections that memory is set aside for.
        adapter_rank: the largest rank of one; None: an engine's `max_adapter_rank`.
        draft: a draft model, given like `model`; its weights are in the same format.
        revision: branch, tag or commit of a hub id.
        offline: take what the hub's cache holds.

    Raises `InvalidRequest` for an option that cannot be, `ModelLoadError` for a config that is not
    there or that the engine cannot load.
    """
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    path = resolve_config(model, revision=revision, offline=offline)
    return plan_config(
        _read(path),
        gpu=gpu,
        context=context,
        batch=batch,
        dtype=dtype,
        nominal=nominal,
        adapters=adapters,
        adapter_rank=adapter_rank,
        draft=None if draft is None else config_of(draft, offline=offline),
        stored=stored_types(path) if is_gguf(path) else (),
    )


def config_of(model: str | Path, *, offline: bool = False) -> ModelConfig:
    """The config of a model, given as for `plan`. Raises `ModelLoadError`."""
    return _read(resolve_config(model, revision=None, offline=offline))


def _read(path: Path) -> ModelConfig:
    if is_gguf(path):
        return read_config(path)
    return parse_config(read_json(path, _MOST_CONFIG_BYTES), file=str(path))


def plan_config(
    config: ModelConfig,
    *,
    gpu: Gpu,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "auto",
    nominal: bool = False,
    adapters: int = 0,
    adapter_rank: int | None = None,
    draft: ModelConfig | None = None,
    stored: tuple[StoredType, ...] = (),
) -> Plan:
    """`plan` for a config that has been read. `stored` is what a GGUF file holds; with it, and for
    a quantised checkpoint, the first of the formats is that of the files."""
    if context is None:
        context = min(_DEFAULT_CONTEXT, config.max_context)
    check_integer("context", context, 1, config.max_context)
    check_integer("batch", batch, 1, _MOST_BATCH)
    if adapter_rank is None:
        adapter_rank = EngineConfig().max_adapter_rank
    check_integer("adapters", adapters, 0, MOST_ADAPTERS)
    check_integer("adapter_rank", adapter_rank, 1, MOST_ADAPTER_RANK)
    if dtype == "auto":
        dtype = config.dtype or "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise InvalidRequest("dtype", dtype, f"must be auto or one of {', '.join(DTYPE_BYTES)}")
    if config.scheme is not None:
        stored = quantised_types(config, dtype)
    size = ModelSize.of(config)
    adapter_bytes = 0
    if adapters:
        numbers = lora_layout(config).elements_per_rank * adapter_rank
        adapter_bytes = adapters * numbers * getattr(torch, dtype).itemsize
    # The kernels read fp8 KV only on GPUs with fp8 units.
    supported = (one for one in FORMATS if one.kv != "fp8" or gpu.fp8)
    formats = (Format(name=dtype), *supported)
    if stored:
        formats = (stored_format(stored), *formats)
    drafts = [_draft_bytes(one, draft, dtype) for one in formats]
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
            _plan_format(one, config, size, gpu, dtype, nominal, context, batch, beside)
            for one, beside in zip(formats, [adapter_bytes + each for each in drafts], strict=True)
        ),
        size=size,
        adapter_bytes=adapter_bytes,
        draft_bytes=drafts[0],
        stored=stored,
    )


def _draft_bytes(format: Format, draft: ModelConfig | None, dtype: str) -> int:
    """What a draft model takes of the memory before the model gets its KV."""
    if draft is None:
        return 0
    size = ModelSize.of(draft)
    weights = format.storage(dtype, size.head_dim).weight_bytes(size)
    engine = EngineConfig()
    return weights + DRAFT_GPU_BYTES + activation_bytes(engine, draft, getattr(torch, dtype))


def _plan_format(
    format: Format,
    config: ModelConfig,
    size: ModelSize,
    gpu: Gpu,
    dtype: str,
    nominal: bool,
    context: int,
    batch: int,
    beside: int,
) -> FormatPlan:
    storage = format.storage(dtype, size.head_dim)
    speed, promised = (format.speed(gpu, dtype, nominal=flag) for flag in (nominal, True))
    memory = gpu.memory - storage.weight_bytes(size) - beside
    capacity = _capacity(storage, config, size, memory, context, getattr(torch, dtype))
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
    memory: float,
    context: int,
    dtype: torch.dtype,
) -> KVCapacity:
    """The KV capacity of an engine with default options, in `memory` bytes beside weights,
    adapters and a draft model."""
    engine = EngineConfig(max_context=context)

    def free(slots: int) -> int:
        sized = engine.replace(max_running=slots)
        beside = activation_bytes(sized, config, dtype) + graph_bytes(sized, config, dtype)
        return max(0, int(engine.kv_fraction * (memory - beside)))

    layer_bytes = storage.kv_bytes(size, engine.block_size)
    states = state_bytes(config, dtype)
    return kv_capacity(config, engine, layer_bytes, free, GPU_OVERLAP, states)
