"""The pages of a runner's KV groups."""

from __future__ import annotations

from asyncinfer.attention import KVCache, KVFormat, StateCache
from asyncinfer.cache import KVGroupSpec
from asyncinfer.models import Decoder
from asyncinfer.scheduler import RunnerSpec

__all__ = ["allocate_caches"]


def allocate_caches(
    decoder: Decoder, group: KVGroupSpec, spec: RunnerSpec, format: KVFormat
) -> list[KVCache | StateCache]:
    """The pages of one group: a cache for each kind of its layers. A group without layers has an
    empty one."""
    model, pages, size, dtype = decoder.config, group.num_pages, spec.block_size, decoder.dtype
    if group.state:
        return [StateCache(model.state, pages, size, dtype, group.layers, decoder.device)]
    shapes = list(model.kv_shapes(group.layers).items()) or [(model.layer_kv(0), ())]
    if model.head_kv is not None and model.num_layers in group.layers:
        shapes.append((model.head_kv, (model.num_layers,)))
    return [
        KVCache.allocate(shape, pages, size, dtype, decoder.device, format=format, layers=layers)
        for shape, layers in shapes
    ]
