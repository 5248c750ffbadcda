"""`load_model`: loads a checkpoint as a `Decoder` on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from asyncinfer.errors import ModelLoadError
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
from asyncinfer.models.predictor import check_predictor, with_predictor
from asyncinfer.models.suited import suited
from asyncinfer.models.tensors import tensor_table
from asyncinfer.quantization import as_tensor
from asyncinfer.weights import (
    MappedCopy,
    OnProgress,
    Packed,
    WeightCache,
    WeightLoader,
    WeightSource,
    WrittenCopy,
    check_weights,
    copy_key,
    host_bytes,
    is_out_of_memory,
    open_checkpoint,
)

__all__ = ["load_model", "load_weights", "outline_model"]

_NO_KERNEL: Final = "no kernel is faster here (it needs llvmlite, and Linux on x86-64 or ARM)"
_AS_FLOATS: Final = f"{_NO_KERNEL}: they are held as floats, which take 2 to 6 times the memory"
_UNPACKED: Final = f"{_NO_KERNEL}: they are unpacked in each step, since floats take half of memory"


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
    cache: WeightCache | None = None,
) -> Decoder:
    """Load the checkpoint in `folder`, with weights converted to `dtype`, for sequences of at most
    `max_context` tokens (None: the model's own maximum). `storage` is the format of the layers'
    matrices, as in `make_linear`. `predictor`: load the layer that predicts further tokens, too,
    which the checkpoint must have. `head`: the folder of a drafting head to load with the model.
    `cache`: keeps a copy of the weights as a CPU's layers hold them, which is mapped from then on.

    Weights stream onto the device one tensor at a time, and `progress` is called on the way. Raises
    `ModelLoadError` for bad files, before any device memory is taken.
    """
    with _opened(folder, device, dtype, progress, storage, predictor, cache=cache) as opened:
        decoder = _decoder(
            opened, torch.device(device), dtype, progress, max_context, storage, head
        )
    # Not before its files are known to be those of the copy's key still.
    if cache is not None and isinstance(opened.copy, WrittenCopy):
        fault = cache.keep(opened.copy)
        if fault is not None:
            note = f"no copy of its weights was kept: {fault}"
            decoder.config = replace(decoder.config, notes=(*decoder.config.notes, note))
    return decoder


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
    with _opened(folder, device, dtype, None, storage, predictor, reads=False) as opened:
        meta = torch.device("meta")
        return _decoder(opened, meta, dtype, None, max_context, storage, head)


def load_weights(
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of the decoder by the names of `tensor_table`, before a device lays them out for
    its matrix products. Raises as `load_model` does."""
    with _opened(folder, device, dtype, progress, "floats") as opened:
        return {name: as_tensor(opened.weights(name)) for name in tensor_table(opened.config)}


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint whose headers were checked."""

    config: ModelConfig
    weights: WeightSource
    copy: MappedCopy | WrittenCopy | None


def _decoder(
    opened: _Opened,
    device: torch.device,
    dtype: torch.dtype,
    progress: OnProgress | None,
    max_context: int | None,
    storage: str,
    head: Path | None,
) -> Decoder:
    config, weights, copy = opened.config, opened.weights, opened.copy
    if head is None:
        return Decoder(config, weights, max_context, storage, copy=copy)
    with _head_opened(head, config, device, dtype, progress) as drafting_head:
        config = with_head(config, drafting_head.config)
        return Decoder(config, weights, max_context, storage, drafting_head, copy)


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
    cache: WeightCache | None = None,
) -> Iterator[_Opened]:
    """The checkpoint. Its weights must be asked for each tensor in the block, unless there is a
    copy that is mapped."""
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
        copy = None
        if cache is not None and device.type == "cpu":
            key = copy_key(checkpoint, table, dtype, storage, keep_packed)
            copy = cache.open(key, progress)
            if isinstance(copy, MappedCopy):
                yield _Opened(config, _none_left, copy)
                return
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
            yield _Opened(config, loader, copy)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ModelLoadError(
                f"{device} has no room for the weights: {error}", file=str(folder)
            ) from error
        loader.finish()
        checkpoint.reader.check_unchanged()


def _none_left(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} is in the copy")


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
        checkpoint.reader.check_unchanged()


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
