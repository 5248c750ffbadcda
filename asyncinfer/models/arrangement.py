"""The order in which the layers take the tensors of a checkpoint."""

from __future__ import annotations

import re

import torch

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.delta_order import delta_outputs, delta_rows
from asyncinfer.models.parts import GatedDeltaConfig, LatentConfig
from asyncinfer.quantization import PackedWeight, as_tensor
from asyncinfer.weights import WeightSource

__all__ = ["arranged"]

_LINEAR = re.compile(r"layers\.(\d+)\.(attention|mixer|mlp|experts|shared)\.(\w+)\.(weight|bias)")
_VECTOR = re.compile(r"layers\.(\d+)\.mixer\.(rate|bias)")
_OUTPUTS = re.compile(r"layers\.(\d+)\.mixer\.out\.weight")
_KV_UP = "attention.kv_up.weight"
_HEAD_NORM = re.compile(r"layers\.(\d+)\.attention\.[qk]_norm")


def arranged(config: ModelConfig, weights: WeightSource) -> WeightSource:
    """`weights` in the layout of the layers: linear weights `[out, in]`, those of experts
    `[experts, out, in]`, the heads of the packed projection in order, gate before up."""

    def whole(name: str) -> torch.Tensor | PackedWeight:
        layer = name.removesuffix(_KV_UP)
        if layer != name and len(config.names.kv_up) == 2:
            keys, values = (
                as_tensor(weights(f"{layer}attention.{part}_up.weight"))
                for part in ("key", "value")
            )
            return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
        weight = weights(name)
        outputs = _OUTPUTS.fullmatch(name)
        if outputs is not None and config.names.delta_tiled:
            mixer = config.layer(int(outputs[1])).mixer
            if isinstance(mixer, GatedDeltaConfig):
                return delta_outputs(mixer, weight)
        if isinstance(weight, torch.Tensor):
            return arrange(name, weight)
        part = _LINEAR.fullmatch(name)
        if part is None:
            return weight
        if config.names.transposed:
            return arrange(name, weight.dequantised())
        if part[2] == "experts" and "{}" not in config.names.expert_down:
            # Numbers have the inputs last already.
            alternates = config.names.expert_up_alternates and part[3] == "up"
            return _gates_first(weight) if alternates else weight
        # A weight's rows are ordered as its bias is.
        rows = torch.arange(weight.shape[0])
        order = arrange(f"{name.removesuffix('.weight')}.bias", rows)
        return weight.view(*order.shape) if torch.equal(order.flatten(), rows) else weight[order]

    def arrange(name: str, tensor: torch.Tensor) -> torch.Tensor:
        norm = _HEAD_NORM.fullmatch(name)
        if norm is not None:
            return _halves(config, int(norm[1]), tensor)
        vector = _VECTOR.fullmatch(name)
        if vector is not None:
            return _by_head(config, int(vector[1]), tensor, vector[2])
        part = _LINEAR.fullmatch(name)
        if part is None:
            return tensor
        layer, module, linear, kind = part.groups()
        if module == "experts" and linear not in ("router", "shared_gate"):
            return _arrange_experts(config, tensor, linear, kind).contiguous()
        if config.names.transposed and kind == "weight":
            tensor = tensor.t()
        if config.latent is not None and config.latent.interleaved:
            tensor = _latent_halves(config, config.latent, tensor, linear)
        if linear.startswith("index_"):
            tensor = _index_halves(config, tensor, linear)
        mixer = config.layer(int(layer)).mixer
        if isinstance(mixer, GatedDeltaConfig) and module == "mixer":
            return delta_rows(config.names, mixer, tensor, linear).contiguous()
        if config.attention_gate and linear == "qkv" and len(config.names.qkv) == 3:
            tensor = _gates_before(config, tensor)
        if config.names.qkv_by_head and linear == "qkv":
            heads = tensor.view(config.num_heads, 3, config.head_dim, *tensor.shape[1:])
            tensor = heads.transpose(0, 1).flatten(0, 2)
        if linear == "qkv":
            own, kv = config.layer(int(layer)), config.layer_kv(int(layer))
            # Values are not rotated, so their heads keep their order.
            apart = own.shares_kv is None and not own.keys_as_values
            values = kv.num_kv_heads * kv.head_dim if apart else 0
            before = tensor[: len(tensor) - values]
            halves = _halves(config, int(layer), before)
            if halves is not before:
                tensor = torch.cat((halves, tensor[len(before) :]))
        return tensor.contiguous()

    return whole


def _halves(config: ModelConfig, layer: int, tensor: torch.Tensor) -> torch.Tensor:
    """Rows of whole query and key heads, reordered so that a rotated pair is half of the rotated
    dimensions apart instead of adjacent. Queries and keys are reordered alike, so their products
    stay the same. Returns the tensor itself if the layer's pairs are not adjacent."""
    rope = config.layer(layer).rope
    if not (config.names.qk_paired if rope is None else rope.interleaved):
        return tensor
    head_dim = config.layer_kv(layer).head_dim
    rows = tensor.view(-1, head_dim, *tensor.shape[1:])
    turned = head_dim if rope is None else rope.size or head_dim
    return _split_pairs(rows, 0, turned).reshape(tensor.shape)


def _latent_halves(
    config: ModelConfig, latent: LatentConfig, tensor: torch.Tensor, linear: str
) -> torch.Tensor:
    """`_halves` for the projections of latent attention, whose rotated dimensions are the last of
    each head."""
    heads = {"query": config.num_heads, "kv_down": 1}.get(linear)
    if heads is None:
        return tensor
    rows = tensor.view(heads, -1, *tensor.shape[1:])
    first = rows.shape[1] - latent.rotated
    return _split_pairs(rows, first, rows.shape[1]).view(tensor.shape)


def _index_halves(config: ModelConfig, tensor: torch.Tensor, linear: str) -> torch.Tensor:
    """`_halves` for the queries, the key and the key norm of an indexer: the first dimensions of a
    head are rotated."""
    latent = config.latent
    indexer = None if latent is None else latent.indexer
    if latent is None or indexer is None or not indexer.interleaved or linear == "index_weights":
        return tensor
    heads = indexer.heads if linear == "index_query" else 1
    rows = tensor.view(heads, -1, *tensor.shape[1:])
    return _split_pairs(rows, 0, latent.rotated).reshape(tensor.shape)


def _split_pairs(rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """`rows` `[heads, dimensions, ...]`, with the first of each pair in `first` to `end - 1` before
    the second ones."""
    rotated = rows[:, first:end]
    return torch.cat((rows[:, :first], rotated[:, 0::2], rotated[:, 1::2], rows[:, end:]), dim=1)


def _by_head(config: ModelConfig, layer: int, tensor: torch.Tensor, part: str) -> torch.Tensor:
    """The per-head tensors of a layer with a state: rates as logarithms."""
    mixer = config.layer(layer).mixer
    if part == "rate" and config.names.plain_rates:
        tensor = (-tensor).log()
    if isinstance(mixer, GatedDeltaConfig):
        return delta_rows(config.names, mixer, tensor, part)
    return tensor


def _gates_before(config: ModelConfig, tensor: torch.Tensor) -> torch.Tensor:
    """Rows of the packed projection in which each head's query is followed by its gate, with all
    gates before all queries."""
    size = 2 * config.num_heads * config.head_dim
    pairs = tensor[:size].view(config.num_heads, 2, config.head_dim, *tensor.shape[1:])
    queries, gates = (part.flatten(0, 1) for part in pairs.unbind(1))
    return torch.cat((gates, queries, tensor[size:]))


def _arrange_experts(
    config: ModelConfig, tensor: torch.Tensor, linear: str, kind: str
) -> torch.Tensor:
    assert config.experts is not None
    names = config.names
    part = names.expert_up[0] if linear == "up" else names.expert_down
    if "{}" in part:
        return tensor.view(config.experts.count, -1, *tensor.shape[1:])
    if kind == "weight" and not names.expert_outputs_first:
        tensor = tensor.transpose(1, 2)
    if linear == "up" and names.expert_up_alternates:
        tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1)
    return tensor


def _gates_first(weight: PackedWeight) -> PackedWeight | torch.Tensor:
    """A weight `[experts, out, in]` whose rows are of gate and up alternately, gate before up."""
    experts, outputs = weight.shape[:2]
    rows = torch.arange(experts * outputs).view(experts, outputs)
    order = torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1).flatten()
    return weight.view(-1)[order].view(experts, outputs)
