"""An adapter's files: a folder as PEFT saves it, from a path or the hub."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from asyncinfer.adapters.config import CONFIG
from asyncinfer.errors import ModelLoadError
from asyncinfer.files import checkpoint_file, read_json
from asyncinfer.weights.hub import HubModel, NotKept, Unreachable, is_hub_id
from asyncinfer.weights.safetensors_file import SafetensorsReader

__all__ = ["AdapterFiles", "open_adapter", "resolve_adapter"]

WEIGHTS: Final = "adapter_model.safetensors"
_PICKLED: Final = "adapter_model.bin"
#: What messages call a config that the caller gives.
_GIVEN: Final = "the given config"
#: A target list of every module of a large model is some hundred kilobytes.
_MOST_CONFIG_BYTES: Final = 4 << 20
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter before it is checked: its config, and its tensors' shapes by PEFT's names."""

    #: The names for messages, of the tensors and of the config.
    source: str
    config_source: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    reader: SafetensorsReader | None
    tensors: Mapping[str, torch.Tensor]

    def dtype(self, name: str) -> torch.dtype | None:
        """What a tensor is stored in; None where that cannot be read."""
        if self.reader is None:
            return self.tensors[name].dtype
        return _DTYPES.get(self.reader.spans(WEIGHTS)[name].dtype)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, on the host, as it is stored."""
        if self.reader is None:
            return self.tensors[name]
        span = self.reader.spans(WEIGHTS)[name]
        dtype = _DTYPES.get(span.dtype)
        if dtype is None:
            raise ModelLoadError(
                f"dtype {span.dtype}: must be one of {', '.join(_DTYPES)}",
                file=self.source,
                tensor=name,
            )
        tensor = torch.empty(span.shape, dtype=dtype)
        if math.prod(span.shape):
            self.reader.read(WEIGHTS, name, 0, tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor


@contextmanager
def open_adapter(
    source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> Iterator[AdapterFiles]:
    """The adapter in a folder, on the hub, or in a state dict with PEFT's names. `config` takes the
    place of the folder's `adapter_config.json`; a state dict needs it. Raises `ModelLoadError`."""
    if isinstance(source, Mapping):
        if config is None:
            raise ModelLoadError(
                "a state dict needs config=, the content of its adapter_config.json: at least "
                "lora_alpha"
            )
        for name, tensor in source.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise ModelLoadError("a state dict maps names to tensors", tensor=str(name)[:80])
            if not tensor.is_floating_point():
                raise ModelLoadError(f"dtype {tensor.dtype}: must be floating", tensor=name)
            if tensor.is_meta or tensor.layout is not torch.strided:
                # Those of a model that was offloaded are on the device "meta", without numbers.
                where = f"{tensor.layout}, on device {tensor.device}"
                raise ModelLoadError(f"{where}: must be dense, and hold its numbers", tensor=name)
        shapes = {name: tuple(tensor.shape) for name, tensor in source.items()}
        yield AdapterFiles("the state dict", _GIVEN, config, shapes, None, source)
        return
    folder = resolve_adapter(source, revision)
    config_source = _GIVEN
    if config is None:
        if checkpoint_file(folder, CONFIG) is None:
            raise ModelLoadError(f"there is no {CONFIG} in it", file=str(folder))
        config_source = str(folder / CONFIG)
        config = read_json(folder / CONFIG, _MOST_CONFIG_BYTES)
    path = checkpoint_file(folder, WEIGHTS)
    if path is None:
        why = f"there is no {WEIGHTS} in it"
        if checkpoint_file(folder, _PICKLED) is not None:
            why += f"; {_PICKLED} is pickled, which can run code: save it as safetensors"
        raise ModelLoadError(why, file=str(folder))
    reader = SafetensorsReader()
    try:
        spans = reader.open(WEIGHTS, path)
        shapes = {name: span.shape for name, span in spans.items()}
        yield AdapterFiles(str(path), config_source, config, shapes, reader, {})
    finally:
        reader.close()


def resolve_adapter(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The local folder of an adapter: a path as it is, a hub id downloaded into the hub's cache.
    Raises `ModelLoadError`."""
    # Not by `Path`, which fails for users that are not known, and for names that are too long.
    local = os.path.expanduser(source)
    # `Path` would take an empty text for the current folder.
    if str(source) and os.path.isdir(local):
        return Path(local)
    named = not isinstance(source, Path) and "/" in str(source) and is_hub_id(str(source))
    if os.path.exists(local) or not named:
        raise ModelLoadError(
            "is no folder of an adapter, and no hub id such as 'org/name' either", file=str(source)
        )
    hub = HubModel(
        str(source), revision, offline=False, cache_dir=None, endpoint=None, show_progress=False
    )
    cached = hub.cached(CONFIG)
    whole = cached is not None and checkpoint_file(cached, WEIGHTS) is not None
    if hub.offline or (whole and hub.is_commit):
        if cached is None or not whole:
            raise hub.refused("it is not there")
        return cached
    try:
        commit, _ = hub.listing(needed=not whole)
        if whole:
            # The branch keeps the copy that is whole until the newer one is, too.
            hub.download(commit, (CONFIG, WEIGHTS))
        return hub.download(hub.revision, (CONFIG, WEIGHTS))
    except (NotKept, Unreachable) as error:
        return hub.instead(cached if whole else None, error)
