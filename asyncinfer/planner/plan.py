"""`plan`: what a model takes on a GPU, and how fast it can be there, from its config or its header
alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from asyncinfer.adapters import lora_layout
from asyncinfer.checks import check_integer
from asyncinfer.config import MOST_ADAPTER_RANK, MOST_ADAPTERS, PREDICTOR, EngineConfig
from asyncinfer.errors import InvalidRequest
from asyncinfer.files import read_config_file
from asyncinfer.models import ModelConfig, parse_config, read_config
from asyncinfer.models.predictor import with_predictor
from asyncinfer.planner.drafting_head import PlannedHead
from asyncinfer.planner.floors import Floor, Speed, decode_floor
from asyncinfer.planner.format_plan import FormatPlan, plan_format
from asyncinfer.planner.formats import DTYPE_BYTES, FORMATS, Format
from asyncinfer.planner.gpus import Gpu, find_gpu
from asyncinfer.planner.size import ModelSize
from asyncinfer.planner.stored import StoredType, quantised_types, stored_format, stored_types
from asyncinfer.runner.memory import DRAFT_GPU_BYTES
from asyncinfer.runner.step_memory import activation_bytes
from asyncinfer.weights import resolve_config
from asyncinfer.weights.gguf import is_gguf

__all__ = ["Plan", "config_of", "plan", "plan_config"]

_DEFAULT_CONTEXT: Final = 4096
_MOST_BATCH: Final = 1 << 20
_MOST_INTERVAL: Final = 1 << 20


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
    #: Bytes of a draft model in the first of the formats: its weights, its KV and its steps. Of a
    #: head its weights alone, as its KV is part of each token's.
    draft_bytes: int = 0
    #: The types of the tensors of a GGUF file or a quantised checkpoint; empty for other models.
    stored: tuple[StoredType, ...] = ()

    def decode_floors(self, batches: tuple[int, ...]) -> tuple[Floor, ...]:
        """The floor of a decode step with the model as it is, for other numbers of sequences."""
        speed = Speed(bandwidth=self.bandwidth, flops=self.flops)
        format = Format(name=self.dtype)
        if self.stored:
            format = stored_format(self.stored, self.dtype)
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
    state_interval: int = 1,
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
        draft: a draft model or an EAGLE-3 head, given like `model`; its weights are in the same
            format. "mtp": the layer of the model that predicts further tokens.
        state_interval: of a model whose layers keep a state, as in `EngineConfig`.
        revision: branch, tag or commit of a hub id.
        offline: take what the hub's cache holds.

    Raises `InvalidRequest` for an option that cannot be, `ModelLoadError` for a config that is not
    there or that the engine cannot load.
    """
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    path = resolve_config(model, revision=revision, offline=offline)
    config = _read(path)
    drafter: ModelConfig | PlannedHead | None = None
    if draft == PREDICTOR:
        config = with_predictor(config)
    elif draft is not None:
        file = resolve_config(draft, revision=None, offline=offline)
        headed = PlannedHead.read(config, file)
        config, drafter = headed or (config, _read(file))
    return plan_config(
        config,
        gpu=gpu,
        context=context,
        batch=batch,
        dtype=dtype,
        nominal=nominal,
        adapters=adapters,
        adapter_rank=adapter_rank,
        draft=drafter,
        state_interval=state_interval,
        stored=stored_types(path) if is_gguf(path) else (),
    )


def config_of(model: str | Path, *, offline: bool = False) -> ModelConfig:
    """The config of a model, given as for `plan`. Raises `ModelLoadError`."""
    return _read(resolve_config(model, revision=None, offline=offline))


def _read(path: Path) -> ModelConfig:
    if is_gguf(path):
        return read_config(path)
    return parse_config(read_config_file(path), file=str(path))


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
    draft: ModelConfig | PlannedHead | None = None,
    state_interval: int = 1,
    stored: tuple[StoredType, ...] = (),
) -> Plan:
    """`plan` for a config that has been read. `stored` is what a GGUF file holds; with it, and for
    a quantised checkpoint, the first of the formats is that of the files. With a `PlannedHead`,
    `config` has a place for its KV."""
    if context is None:
        context = min(_DEFAULT_CONTEXT, config.max_context)
    check_integer("context", context, 1, config.max_context)
    check_integer("batch", batch, 1, _MOST_BATCH)
    if adapter_rank is None:
        adapter_rank = EngineConfig().max_adapter_rank
    check_integer("adapters", adapters, 0, MOST_ADAPTERS)
    check_integer("adapter_rank", adapter_rank, 1, MOST_ADAPTER_RANK)
    check_integer("state_interval", state_interval, 1, _MOST_INTERVAL)
    if state_interval > 1 and not config.state_layers:
        why = f"no layer of {config.architecture} keeps a state"
        raise InvalidRequest("state_interval", state_interval, why)
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
        formats = (stored_format(stored, dtype), *formats)
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
            plan_format(
                one, config, size, gpu, dtype, nominal, context, batch, beside, state_interval
            )
            for one, beside in zip(formats, [adapter_bytes + each for each in drafts], strict=True)
        ),
        size=size,
        adapter_bytes=adapter_bytes,
        draft_bytes=drafts[0],
        stored=stored,
    )


def _draft_bytes(format: Format, draft: ModelConfig | PlannedHead | None, dtype: str) -> int:
    """Bytes of a draft model or a head, which are reserved before the model gets its KV."""
    if draft is None:
        return 0
    if isinstance(draft, PlannedHead):
        return draft.bytes(format, dtype)
    size = ModelSize.of(draft)
    weights = format.storage(dtype, size.head_dim).weight_bytes(size)
    engine = EngineConfig()
    return weights + DRAFT_GPU_BYTES + activation_bytes(engine, draft, getattr(torch, dtype))
