"""`AdapterPool`: where the matrices of an engine's adapters lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.adapters.device_work import compile_kernels, own_stream
from asyncinfer.adapters.files import open_adapter
from asyncinfer.adapters.modules import LoraLayout, lora_layout
from asyncinfer.adapters.read import CheckedAdapter, check_adapter
from asyncinfer.adapters.slot_memory import forget, zeros
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels.dispatch import wants_triton
from asyncinfer.kernels.native import LoraKernel, lora_kernel
from asyncinfer.layers import (
    DeviceLoraRows,
    GroupedLoraRows,
    JoinedLoraRows,
    LoraLayers,
    LoraRows,
    LoraWeights,
)
from asyncinfer.models import ModelConfig
from asyncinfer.runtime import check_cancelled
from asyncinfer.weights import is_out_of_memory

__all__ = ["MOST_BYTES", "AdapterPool", "LoadedAdapter"]

#: Bytes that a pool takes unless it is told.
MOST_BYTES: Final = 1 << 30
#: The dtypes that adapters may be held in.
_HELD: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in the pool."""

    slot: int
    rank: int
    #: Bytes of its matrices as the pool holds them.
    bytes: int
    #: The model it was trained on, as its maker named it.
    base: str | None = None


class AdapterPool:
    """Slots of one size for adapters, in the model's dtype on its device. A CPU's kernel reads
    matrices of 16 bits as well: beside a float32 model an adapter whose file has such stays so, if
    that rounds nothing.

    The first adapter takes the memory for all slots. A CPU commits it page by page as adapters are
    loaded, and gets it back with the last one of a dtype. A GPU keeps it, since recorded steps hold
    its address.

    `load` and `release` may be called on any thread while steps run: a step reads the slots of its
    own rows' adapters only, and nobody has a slot that is being written.
    """

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_adapters: int,
        max_rank: int,
        max_bytes: int | None = None,
        warm_up: bool = False,
    ) -> None:
        """Takes no memory. Fewer slots than `max_adapters` are made if no more fit `max_bytes`.
        `warm_up`: the thread that loads the first adapter compiles Triton's kernels, so that no
        step waits for them."""
        self.layout: LoraLayout = lora_layout(model)
        self.max_rank = max_rank
        #: Bytes of all adapters that are loaded.
        self.bytes = 0
        self._device = device
        self._warm_up = warm_up
        self._dtype = dtype
        self._bytes_per_rank = self.layout.elements_per_rank * dtype.itemsize
        self._max_bytes = MOST_BYTES if max_bytes is None else max_bytes
        slot_bytes = max(1, max_rank * self._bytes_per_rank)
        self._slots = min(max_adapters, self._max_bytes // slot_bytes)
        self._max_adapters = max_adapters
        self._free = list(range(self._slots - 1, -1, -1))
        self._loaded: dict[int, LoadedAdapter] = {}
        #: By dtype: all slots, of which adapters of another dtype leave theirs empty.
        self._layers: dict[torch.dtype, LoraLayers] = {}
        #: The CPU's kernels. Each is compiled with the first adapter of its dtype, so that no step
        #: waits for it.
        self._kernels: dict[torch.dtype, LoraKernel | None] = {}
        #: By slot: the dtype of its adapter, as a place in `_HELD`.
        self._kinds = np.zeros(self._slots, np.int8)
        #: By dtype, slot and layer: ranks that hold other numbers than zero.
        self._written: dict[tuple[torch.dtype, int, str], int] = {}
        self._lock = RLock()

    @property
    def layers(self) -> Mapping[torch.dtype, LoraLayers]:
        """The matrices by dtype and linear layer; none before the first adapter."""
        return self._layers

    @property
    def capacity(self) -> int:
        """Bytes of all slots in the model's dtype."""
        return self._slots * self.max_rank * self._bytes_per_rank

    def read(
        self,
        source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
        config: Mapping[str, Any] | None = None,
        revision: str | None = None,
    ) -> LoadedAdapter:
        """Open, check and load an adapter: arguments as for `open_adapter`. Raises
        `ModelLoadError`."""
        with open_adapter(source, config, revision) as files:
            return self.load(check_adapter(files, self.layout, self.max_rank))

    def load(self, adapter: CheckedAdapter) -> LoadedAdapter:
        """Read an adapter's tensors into a free slot. Raises `ModelLoadError`."""
        slot = self._take()
        try:
            with torch.inference_mode(), own_stream(self._device):
                dtype = self._fill(slot, adapter)
        except BaseException as error:
            self._give_back(slot)
            if isinstance(error, MemoryError | RuntimeError) and is_out_of_memory(error):
                raise ModelLoadError(
                    f"{self._device} has no room for {self.capacity} bytes of adapters; "
                    "max_adapters, max_adapter_rank and adapter_bytes bound them"
                ) from error
            raise
        numbers = sum(
            layer.elements_per_rank * self._layers[dtype][name].host_ranks[slot]
            for name, layer in self.layout.layers.items()
        )
        size = numbers * dtype.itemsize
        loaded = LoadedAdapter(slot, adapter.rank, size, adapter.config.base)
        with self._lock:
            self._loaded[slot] = loaded
            self.bytes += loaded.bytes
        return loaded

    def release(self, loaded: LoadedAdapter) -> None:
        """Free the slot of an adapter that no row takes any more, and none will. Any thread."""
        with self._lock:
            del self._loaded[loaded.slot]
            self.bytes -= loaded.bytes
        self._give_back(loaded.slot)

    def rows(self, slots: npt.NDArray[np.int64], *, apart: bool = False) -> LoraRows:
        """The adapters of the query tokens of a step on a CPU, int64 `[tokens]`, -1 for none.
        `apart`: each token is computed by itself."""
        parts = []
        places = tuple(self._layers.items())
        for dtype, layers in places:
            own = slots
            if len(places) > 1:
                theirs = (slots >= 0) & (self._kinds[slots] == _HELD.index(dtype))
                if not theirs.any():
                    continue
                own = np.where(theirs, slots, -1)
            kernel = self._kernels[dtype]
            parts.append(GroupedLoraRows(layers, own, kernel=kernel, apart=apart))
        return parts[0] if len(parts) == 1 else JoinedLoraRows(parts)

    def rows_on_device(self, slots: torch.Tensor) -> LoraRows:
        """`rows` of int32 `[tokens]` on the device, which a recorded step reads at each replay."""
        return DeviceLoraRows(self._layers.get(self._dtype, {}), slots)

    def _take(self) -> int:
        with self._lock:
            if self._free:
                # Low slots first, so that those in use lie side by side.
                self._free.sort(reverse=True)
                return self._free.pop()
        if self._slots < self._max_adapters:
            raise ModelLoadError(
                f"adapter_bytes={self._max_bytes} has room for {self._slots} adapters of "
                f"max_adapter_rank={self.max_rank}, {self.max_rank * self._bytes_per_rank} bytes "
                "each, and as many are loaded"
            )
        raise ModelLoadError(
            f"max_adapters={self._max_adapters} are loaded; unload one that nobody needs"
        )

    def _give_back(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)
            loading = self._slots - len(self._free) - len(self._loaded)
            if self._device.type == "cpu" and not loading:
                # Dtypes that no adapter has any more are given back whole.
                held = {_HELD[self._kinds[slot]] for slot in self._loaded}
                self._layers = {key: kept for key, kept in self._layers.items() if key in held}
                self._written = {key: rank for key, rank in self._written.items() if key[0] in held}

    def _fill(self, slot: int, adapter: CheckedAdapter) -> torch.dtype:
        """Write an adapter's matrices; gives the dtype that they are held in."""
        dtype = self._narrow(adapter.dtype) or self._dtype
        if not self._fill_in(slot, adapter, dtype):
            # Scaled numbers may need more bits than the file's.
            dtype = self._dtype
            self._fill_in(slot, adapter, dtype)
        for other in self._layers.keys() - {dtype}:
            self._forget(slot, other)
        self._kinds[slot] = _HELD.index(dtype)
        return dtype

    def _forget(self, slot: int, dtype: torch.dtype) -> None:
        """Free the slot's memory in a dtype that its adapter is not held in."""
        for name, weights in self._layers[dtype].items():
            if rank := self._written.pop((dtype, slot, name), 0):
                forget(weights.down[slot, : rank * len(weights.sizes)])
                forget(weights.up[slot, :rank])
                weights.host_ranks[slot] = 0

    def _narrow(self, stored: torch.dtype) -> torch.dtype | None:
        """The 16-bit dtype in which numbers stored as `stored` can stay."""
        stays = stored in _HELD[1:] and self._device.type == "cpu" and self._dtype is torch.float32
        return stored if stays and lora_kernel(stored) is not None else None

    def _fill_in(self, slot: int, adapter: CheckedAdapter, dtype: torch.dtype) -> bool:
        """Write the matrices in `dtype`; gives up where a dtype that is not the model's would round
        a number."""
        layers = self._allocated(dtype)
        untouched = set(layers)
        for layer, down, up in adapter.matrices():
            check_cancelled()
            untouched.discard(layer.name)
            self._write(slot, layer.name, layers[layer.name], down, up)
            if dtype is not self._dtype and not _is_exact(layers[layer.name], slot, down, up):
                return False
        for name in untouched:
            self._write(slot, name, layers[name], None, None)
        return True

    def _write(
        self,
        slot: int,
        name: str,
        weights: LoraWeights,
        down: torch.Tensor | None,
        up: torch.Tensor | None,
    ) -> None:
        parts, rank = len(weights.sizes), 0
        key = weights.up.dtype, slot, name
        before = self._written.get(key, 0)
        if down is not None and up is not None:
            rank = up.shape[0]
            # Noted before the copies, since one that fails midway has written, too.
            self._written[key] = max(before, rank)
            weights.down[slot, : rank * parts].copy_(down)
            weights.up[slot, :rank].copy_(up)
        # Batched products read as many ranks of every slot as the largest has.
        if before > rank:
            weights.down[slot, rank * parts : before * parts].zero_()
            weights.up[slot, rank:before].zero_()
        self._written[key] = rank
        weights.host_ranks[slot] = rank
        weights.ranks[slot : slot + 1].fill_(rank)

    def _allocated(self, dtype: torch.dtype) -> LoraLayers:
        if dtype not in self._layers:
            self._kernels[dtype] = lora_kernel(dtype) if self._device.type == "cpu" else None
            slots, rank = self._slots, self.max_rank
            self._layers[dtype] = {
                name: LoraWeights(
                    down=zeros(self._device, dtype, slots, rank * len(layer.sizes), layer.inputs),
                    up=zeros(self._device, dtype, slots, rank, sum(layer.sizes)),
                    sizes=layer.sizes,
                    ranks=torch.zeros(slots, dtype=torch.int32, device=self._device),
                    host_ranks=[0] * slots,
                )
                for name, layer in self.layout.layers.items()
            }
            if self._warm_up and wants_triton():
                compile_kernels(self._layers[dtype])
        return self._layers[dtype]


def _is_exact(weights: LoraWeights, slot: int, down: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether a slot holds these matrices as they are."""
    first, second = weights.down[slot, : down.shape[0]], weights.up[slot, : up.shape[0]]
    return torch.equal(first.float(), down) and torch.equal(second.float(), up)
