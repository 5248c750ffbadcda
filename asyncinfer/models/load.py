"""`load_model`: loads a checkpoint as a `Decoder` on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from asyncinfer.errors import ModelLoadError
from asyncinfer.files import checkpoint_file
from asyncinfer.kernels import native
from asyncinfer.kernels.dispatch import triton_is_missing, wants_triton
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.config_file import read_config
from asyncinfer.models.decoder import Decoder
from asyncinfer.models.eagle3 import HeadWeights
from asyncinfer.models.eagle3_config import read_eagle3, with_head
from asyncinfer.models.eagle3_weights import (
    TOKENS,
    eagle3_table,
    fitted,
    ignored_beside,
    token_choice,
)
from asyncinfer.models.leftovers import ignored_tensor
from asyncinfer.models.parts import GatedDeltaConfig
from asyncinfer.models.predictor import check_predictor, with_predictor
from asyncinfer.models.tensors import tensor_table
from asyncinfer.quantization import as_tensor
from asyncinfer.weights import (
    OnProgress,
    Packed,
    TensorFiles,
    WeightLoader,
    WeightSource,
    check_weights,
    host_bytes,
    is_out_of_memory,
    open_checkpoint,
)

__all__ = ["load_model", "load_weights", "outline_model", "suited"]

_NO_KERNEL: Final = "no kernel is faster here (it needs llvmlite, and Linux on x86-64 or ARM)"
_AS_FLOATS: Final = f"{_NO_KERNEL}: they are held as floats, which take 2 to 6 times the memory"
_UNPACKED: Final = f"{_NO_KERNEL}: they are unpacked in each step, since floats take half of memory"

_NO_HEAD: Final = "it has no head: only its vectors mean something, its answers do not"


def load_model(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
    *,
    max_context: int | None = None,
    storage: str = "plain",
    predictor: bool = False,
    head: Path | None = None,
) -> Decoder:
    """Load the checkpoint in `folder`, with weights converted to `dtype`, for sequences of at most
    `max_context` tokens (None: the model's own maximum). `storage` is the format of the layers'
    matrices, as in `make_linear`. `predictor`: load the layer that predicts further tokens, too,
    which the checkpoint must have. `head`: the folder of a drafting head to load with the model.

    Weights stream onto the device one tensor at a time, and `progress` is called on the way. Raises
    `ModelLoadError` for bad files, before any device memory is taken.
    """
    with _opened(folder, device, dtype, progress, storage, predictor) as (config, weights):
        if head is None:
            return Decoder(config, weights, max_context, storage)
        with _head_opened(head, config, torch.device(device), dtype, progress) as drafting_head:
            config = with_head(config, drafting_head.config)
            return Decoder(config, weights, max_context, storage, drafting_head)


def outline_model(
    folder: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_context: int | None = None,
    storage: str = "plain",
    predictor: bool = False,
    head: Path | None = None,
) -> Decoder:
    """The decoder that `load_model` would make for `device`, with tensors on torch's device "meta",
    which have no memory: only headers are read. Call it in a rehearsal for that device. Raises as
    `load_model` does, and for a format that cannot lay out weights without numbers.
    """
    with _opened(folder, device, dtype, None, storage, predictor, reads=False) as (config, weights):
        if head is None:
            return Decoder(config, weights, max_context, storage)
        with _head_opened(head, config, torch.device("meta"), dtype, None) as drafting_head:
            config = with_head(config, drafting_head.config)
            return Decoder(config, weights, max_context, storage, drafting_head)


def load_weights(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of the decoder by the names of `tensor_table`, before a device lays them out for
    its matrix products. Raises as `load_model` does."""
    with _opened(folder, device, dtype, progress, "floats") as (config, weights):
        return {name: as_tensor(weights(name)) for name in tensor_table(config)}


@contextmanager
def _opened(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None,
    storage: str,
    predictor: bool = False,
    *,
    reads: bool = True,
) -> Iterator[tuple[ModelConfig, WeightSource]]:
    """The config and the source of the weights, which must be asked for each tensor in the
    block."""
    config = read_config(folder)
    with open_checkpoint(folder) as checkpoint, torch.inference_mode():
        config = suited(config, checkpoint)
        if predictor:
            config = with_predictor(config)
            check_predictor(config, checkpoint)
        table = tensor_table(config)
        ignored = partial(ignored_tensor, config=config)
        quantised = check_weights(checkpoint, table, ignored, config.scheme)
        device = torch.device(device)
        keep_packed = _stays_packed(table, device, dtype, storage)
        if storage != "floats" and device.type == "cpu" and not native.available():
            pieces = (piece.name for packed in table.values() for piece in packed.pieces)
            if storage != "plain":
                config = replace(config, lacking=_NO_KERNEL)
            elif quantised or any(checkpoint.block_type(name) is not None for name in pieces):
                config = replace(config, lacking=_UNPACKED if keep_packed else _AS_FLOATS)
        loader = WeightLoader(
            checkpoint,
            table,
            device if reads else torch.device("meta"),
            dtype,
            progress,
            quantised=quantised,
            keep_packed=keep_packed,
            reads=reads,
        )
        try:
            yield config, loader
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ModelLoadError(
                f"{device} has no room for the weights: {error}", file=str(folder)
            ) from error
        loader.finish()


@contextmanager
def _head_opened(
    folder: Path,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: OnProgress | None,
) -> Iterator[HeadWeights]:
    """The head in `folder` for a model. Each of its tensors must be loaded inside the block. On
    torch's device "meta" none is read."""
    config, reads = read_eagle3(folder, model), device.type != "meta"
    with open_checkpoint(folder) as checkpoint:
        config = fitted(config, checkpoint.tensors)
        table, scheme = eagle3_table(config, checkpoint.tensors), config.layer.scheme
        quantised = check_weights(checkpoint, table, ignored_beside, scheme)
        beside = [TOKENS] if reads and config.chooses and TOKENS in checkpoint.tensors else []
        loader = WeightLoader(
            checkpoint,
            table,
            device,
            dtype,
            progress,
            quantised=quantised,
            beside=beside,
            reads=reads,
        )
        if reads or not config.chooses:
            chosen = token_choice(config, checkpoint, loader.as_stored)
        else:
            # Checking the choice of tokens needs its numbers.
            chosen = torch.empty(config.draft_vocab_size, dtype=torch.int64, device="meta")
        yield HeadWeights(config, loader, chosen)
        loader.finish()


def _stays_packed(
    table: Mapping[str, Packed], device: torch.device, dtype: torch.dtype, storage: str
) -> bool:
    """Whether quantised matrices stay as they are."""
    # Another format is made from floats.
    if storage != "plain":
        return False
    on_gpu = device.type == "cuda"
    if wants_triton() and triton_is_missing() is None if on_gpu else native.available():
        return True
    # Floats are faster than numbers that each call unpacks, if there is memory for them.
    numbers = sum(math.prod(packed.shape) for packed in table.values())
    memory = torch.cuda.mem_get_info(device)[1] if on_gpu else host_bytes()
    return numbers * dtype.itemsize > memory // 2


def suited(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with the names of this checkpoint's tensors, where an architecture's checkpoints
    differ: with or without a prefix, with or without a head, with all experts of a layer in one
    tensor, with other names of norms and of modules, with convolutions that are cut elsewhere."""
    config = _recut(_respelled(_without_prefix(config, checkpoint), checkpoint), checkpoint)
    config = _moved(config, checkpoint)
    fused = config.names.fused_experts
    if fused is None or not any(name.endswith(f".{fused[0]}") for name in checkpoint.tensors):
        return config
    names = replace(
        config.names, expert_up=fused[:1], expert_down=fused[1], expert_outputs_first=True
    )
    return replace(config, names=names)


def _respelled(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with those of `names.spellings` that the checkpoint has in place of the usual
    names."""
    names = config.names
    if not names.spellings:
        return config
    there = {".".join(name.split(".")[-2:]) for name in checkpoint.tensors}
    others: dict[str, Any] = {
        field: other
        for field, other in names.spellings
        if f"{getattr(names, field)}.weight" not in there and f"{other}.weight" in there
    }
    return replace(config, names=replace(names, **others))


def _moved(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with the second of `names.mlp_modules` for plain feed-forward layers, where the
    checkpoint has no tensor under the first: transformers saves Kimi Linear so."""
    names = config.names
    if names.mlp_modules is None:
        return config
    first, second = (f"{module}." for module in names.mlp_modules)
    if any(f".{first}" in name for name in checkpoint.tensors):
        return config
    up = tuple(name.replace(first, second) for name in names.up)
    names = replace(names, up=up, down=names.down.replace(first, second))
    return replace(config, names=names)


def _recut(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with the channels of a gated delta net's convolutions as this checkpoint cuts
    them: transformers saves thirds of all channels under the names of queries, keys and values."""
    names, mixers = config.names, {layer.mixer for layer in config.layers}
    mixer = next((each for each in mixers if isinstance(each, GatedDeltaConfig)), None)
    if mixer is None or len(names.delta_conv) == 1:
        return config
    prefix = f"{names.prefix}{names.layers}.{config.state_layers[0]}."
    stored = [checkpoint.tensors.get(f"{prefix}{name}.weight") for name in names.delta_conv]
    rows = tuple(tensor.shape[0] for tensor in stored if tensor is not None and tensor.shape)
    if len(rows) != len(stored) or sum(rows) != mixer.channels:
        return config
    return replace(config, names=replace(names, delta_conv_rows=rows))


def _without_prefix(config: ModelConfig, checkpoint: TensorFiles[Any]) -> ModelConfig:
    """The config with an empty prefix if the checkpoint's tensors lack the architecture's prefix,
    as in a model that was saved without its head. An embedding model needs no head: where it has
    none, its embedding takes that place, so that no other code knows of models without a head."""
    prefix, other = config.names.prefix, config.names.other_prefix
    if any(name.startswith(prefix) for name in checkpoint.tensors):
        return config
    if other is not None and any(name.startswith(other[0]) for name in checkpoint.tensors):
        return replace(config, names=replace(config.names, prefix=other[0], head=other[1]))
    embedding = f"{config.names.embedding}.weight"
    if embedding not in checkpoint.tensors:
        return config
    config = replace(config, names=replace(config.names, prefix=""))
    headless = not config.tied_head and f"{config.names.head}.weight" not in checkpoint.tensors
    if headless and checkpoint_file(checkpoint.folder, "modules.json") is not None:
        return replace(config, tied_head=True, head_bias=False, notes=(*config.notes, _NO_HEAD))
    return config
