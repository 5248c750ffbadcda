"""The tensors of a decoder, and how a checkpoint stores them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from asyncinfer.layers import learned
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import LatentConfig
from asyncinfer.weights import Packed, Piece, WeightSource

__all__ = ["arranged", "block_norms", "ignored_tensor", "tensor_table"]

_NORMS = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "sandwich": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "parallel": ("attention_norm", "mlp_norm"),
    "parallel-shared": ("attention_norm",),
}
_LINEAR = re.compile(r"layers\.(\d+)\.(attention|mlp|experts|shared)\.(\w+)\.(weight|bias)")
_HEAD_NORM = re.compile(r"layers\.(\d+)\.attention\.[qk]_norm")


def block_norms(config: ModelConfig) -> tuple[str, ...]:
    """The norms of one layer, by their names in the tensor table."""
    return _NORMS[config.block]


def tensor_table(config: ModelConfig) -> dict[str, Packed]:
    """The model's tensors by name, in the order of loading. Each is one tensor of the checkpoint,
    or several concatenated along dimension 0."""
    names, hidden = config.names, config.hidden_size
    prefix, vocab = names.prefix, config.vocab_size
    table = {"embedding": _one(f"{prefix}{names.embedding}.weight", vocab, hidden)}
    if config.learned_positions is not None:
        table["positions"] = _one(
            f"{prefix}{names.positions}.weight", config.learned_positions, hidden
        )
    for layer in range(config.num_layers):
        theirs = f"{prefix}{names.layers}.{layer}."
        for name, packed in (
            *_attention(config, theirs),
            *_mlp(config, layer, theirs),
            *_shared(config, layer, theirs),
        ):
            table[f"layers.{layer}.{name}"] = packed
    table |= _norm(config, "norm", f"{prefix}{names.norm}")
    if not config.tied_head:
        table["head.weight"] = _one(f"{names.head}.weight", vocab, hidden)
    if config.head_bias:
        table["head.bias"] = _one(f"{names.head}.bias", vocab)
    return table


def _attention(config: ModelConfig, theirs: str) -> Iterator[tuple[str, Packed]]:
    names, hidden = config.names, config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name in block_norms(config):
        yield from _norm(config, name, theirs + getattr(names, name)).items()

    if config.latent is not None:
        yield from _latent(config, config.latent, f"{theirs}self_attn.")
        return
    yield from _linear(
        config, theirs, "attention.qkv", names.qkv, (q, kv, kv), hidden, config.qkv_bias
    )
    yield from _linear(config, theirs, "attention.out", (names.out,), (hidden,), q, config.out_bias)
    if config.qk_norm is not None and config.norm_weight:
        sizes = (config.head_dim, config.head_dim) if config.qk_norm == "head" else (q, kv)
        for ours, name, size in zip(
            ("q_norm", "k_norm"), (names.q_norm, names.k_norm), sizes, strict=True
        ):
            yield f"attention.{ours}", _one(f"{theirs}{name}.weight", size)
    if config.sinks:
        yield "attention.sinks", _one(theirs + names.sinks, config.num_heads)


def _latent(config: ModelConfig, latent: LatentConfig, theirs: str) -> Iterator[tuple[str, Packed]]:
    hidden, heads, bias = config.hidden_size, config.num_heads, config.qkv_bias
    last, inputs = "q_proj", hidden
    if latent.query_rank is not None:
        last, inputs = "q_b_proj", latent.query_rank
        yield from _linear(
            config, theirs, "attention.query_down", ("q_a_proj",), (inputs,), hidden, bias
        )
        yield "attention.query_norm", _one(f"{theirs}q_a_layernorm.weight", inputs)
    queries = heads * (latent.plain + latent.rotated)
    yield from _linear(config, theirs, "attention.query", (last,), (queries,), inputs, False)
    down = ("kv_a_proj_with_mqa",), (latent.kv_rank + latent.rotated,), hidden, bias
    yield from _linear(config, theirs, "attention.kv_down", *down)
    yield "attention.kv_norm", _one(f"{theirs}kv_a_layernorm.weight", latent.kv_rank)
    up = ("kv_b_proj",), (heads * (latent.plain + latent.value),), latent.kv_rank, False
    yield from _linear(config, theirs, "attention.kv_up", *up)
    out = ("o_proj",), (hidden,), heads * latent.value, config.out_bias
    yield from _linear(config, theirs, "attention.out", *out)


def _mlp(config: ModelConfig, layer: int, theirs: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
    experts = config.layer_experts(layer)
    if experts is None:
        up = (inner, inner) if config.gated_mlp else (inner,)
        yield from _linear(config, theirs, "mlp.up", names.up, up, hidden, config.mlp_bias)
        with_weights = learned(config.activation)
        if with_weights is not None:
            for index, (name, shape) in enumerate(with_weights.weights):
                yield f"mlp.activation.{index}", _one(theirs + name, *shape)
        yield from _linear(
            config, theirs, "mlp.down", (names.down,), (hidden,), inner, config.mlp_bias
        )
        return
    size = experts.intermediate_size
    router = (names.router,), (experts.count,), hidden, experts.router_bias
    yield from _linear(config, theirs, "experts.router", *router)
    if experts.correction:
        # float32, since scores may differ by less than a 16-bit step.
        pieces = _one(theirs + names.correction, experts.count).pieces
        yield "experts.correction", Packed(pieces, torch.float32)
    for ours, parts, outputs, inputs in (
        ("experts.up", names.expert_up, size, hidden),
        ("experts.down", (names.expert_down,), hidden, size),
    ):
        if "{}" not in parts[0]:
            outputs *= 2 if ours == "experts.up" else 1
            (part,) = parts
            yield f"{ours}.weight", _one(theirs + part, experts.count, inputs, outputs)
            if experts.bias:
                yield f"{ours}.bias", _one(f"{theirs}{part}_bias", experts.count, outputs)
            continue
        each = [theirs + part.format(number) for number in range(experts.count) for part in parts]
        pieces = tuple(Piece(f"{part}.weight", (outputs, inputs)) for part in each)
        yield f"{ours}.weight", Packed(pieces)
        if experts.bias:
            yield f"{ours}.bias", Packed(tuple(Piece(f"{part}.bias", (outputs,)) for part in each))


def _shared(config: ModelConfig, layer: int, theirs: str) -> Iterator[tuple[str, Packed]]:
    experts, names = config.layer_experts(layer), config.names
    size = 0 if experts is None else experts.shared_size
    if size:
        up = names.shared_up, (size, size), config.hidden_size, config.mlp_bias
        yield from _linear(config, theirs, "shared.up", *up)
        down = (names.shared_down,), (config.hidden_size,), size, config.mlp_bias
        yield from _linear(config, theirs, "shared.down", *down)


def _linear(
    config: ModelConfig,
    theirs: str,
    ours: str,
    parts: tuple[str, ...],
    outputs: tuple[int, ...],
    inputs: int,
    bias: bool,
) -> Iterator[tuple[str, Packed]]:
    # Some checkpoints hold all parts in one tensor.
    sizes = outputs if len(parts) > 1 else (sum(outputs),)
    pieces = [(theirs + part, size) for part, size in zip(parts, sizes, strict=True)]
    turned = config.names.transposed
    yield (
        f"{ours}.weight",
        Packed(
            tuple(
                Piece(f"{part}.weight", (inputs, n) if turned else (n, inputs))
                for part, n in pieces
            )
        ),
    )
    if bias:
        yield f"{ours}.bias", Packed(tuple(Piece(f"{part}.bias", (n,)) for part, n in pieces))


def arranged(config: ModelConfig, weights: WeightSource) -> WeightSource:
    """`weights` in the layout of the layers: linear weights `[out, in]`, those of experts
    `[experts, out, in]`, the heads of the packed projection in order, gate before up."""

    def arrange(name: str) -> torch.Tensor:
        tensor = weights(name)
        norm = _HEAD_NORM.fullmatch(name)
        if norm is not None:
            return _halves(config, int(norm[1]), tensor)
        part = _LINEAR.fullmatch(name)
        if part is None:
            return tensor
        layer, module, linear, kind = part.groups()
        if module == "experts" and linear != "router":
            return _arrange_experts(config, tensor, linear, kind).contiguous()
        if config.names.transposed and kind == "weight":
            tensor = tensor.t()
        if config.latent is not None and config.latent.interleaved:
            tensor = _latent_halves(config, config.latent, tensor, linear)
        if config.names.qkv_by_head and linear == "qkv":
            heads = tensor.view(config.num_heads, 3, config.head_dim, *tensor.shape[1:])
            tensor = heads.transpose(0, 1).flatten(0, 2)
        if linear == "qkv":
            values = config.num_kv_heads * config.head_dim
            before = tensor[:-values]
            halves = _halves(config, int(layer), before)
            if halves is not before:
                tensor = torch.cat((halves, tensor[-values:]))
        return tensor.contiguous()

    return arrange


def _halves(config: ModelConfig, layer: int, tensor: torch.Tensor) -> torch.Tensor:
    """Rows of whole query and key heads, reordered so that a rotated pair is half of the rotated
    dimensions apart instead of adjacent. Queries and keys are reordered alike, so their products
    stay the same. Gives the tensor itself if the layer's pairs are not adjacent."""
    rope = config.layer(layer).rope
    if rope is None or not rope.interleaved:
        return tensor
    rows = tensor.view(-1, config.head_dim, *tensor.shape[1:])
    return _split_pairs(rows, 0, rope.size or config.head_dim).reshape(tensor.shape)


def _latent_halves(
    config: ModelConfig, latent: LatentConfig, tensor: torch.Tensor, linear: str
) -> torch.Tensor:
    """The same for the projections of latent attention, whose rotated dimensions are the last of
    each head."""
    heads = {"query": config.num_heads, "kv_down": 1}.get(linear)
    if heads is None:
        return tensor
    rows = tensor.view(heads, -1, *tensor.shape[1:])
    first = rows.shape[1] - latent.rotated
    return _split_pairs(rows, first, rows.shape[1]).view(tensor.shape)


def _split_pairs(rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """`rows` `[heads, dimensions, ...]`, with the first of each pair in `first` to `end - 1` before
    the second ones."""
    rotated = rows[:, first:end]
    return torch.cat((rows[:, :first], rotated[:, 0::2], rotated[:, 1::2], rows[:, end:]), dim=1)


def _arrange_experts(
    config: ModelConfig, tensor: torch.Tensor, linear: str, kind: str
) -> torch.Tensor:
    assert config.experts is not None
    names = config.names
    part = names.expert_up[0] if linear == "up" else names.expert_down
    if "{}" in part:
        return tensor.view(config.experts.count, -1, *tensor.shape[1:])
    if kind == "weight":
        tensor = tensor.transpose(1, 2)
    if linear == "up" and names.expert_up_alternates:
        tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1)
    return tensor


def ignored_tensor(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this tensor though the model does not use it: it matches
    `names.ignored`, or is the second copy of a tied head."""
    if config.tied_head and name == f"{config.names.head}.weight":
        return True
    return any(re.fullmatch(pattern, name) for pattern in config.names.ignored)


def _norm(config: ModelConfig, ours: str, theirs: str) -> dict[str, Packed]:
    if not config.norm_weight:
        return {}
    table = {f"{ours}.weight": _one(f"{theirs}.weight", config.hidden_size)}
    if config.norms_have_bias:
        table[f"{ours}.bias"] = _one(f"{theirs}.bias", config.hidden_size)
    return table


def _one(name: str, *shape: int) -> Packed:
    return Packed((Piece(name, shape),))
