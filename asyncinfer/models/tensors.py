"""Which tensors a decoder is made of, and how a checkpoint keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from asyncinfer.models.config import ModelConfig
from asyncinfer.weights import Packed, Piece, WeightSource

__all__ = ["arranged", "block_norms", "ignored_tensor", "tensor_table"]

_NORMS = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "sandwich": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "parallel": ("attention_norm", "mlp_norm"),
    "parallel-shared": ("attention_norm",),
}


def block_norms(config: ModelConfig) -> tuple[str, ...]:
    """The norms of one layer, by our names."""
    return _NORMS[config.block]


def tensor_table(config: ModelConfig) -> dict[str, Packed]:
    """The model's tensors by name, in the order they are loaded: each is one tensor of the
    checkpoint or several packed below each other."""
    names, hidden = config.names, config.hidden_size
    prefix, vocab = names.prefix, config.vocab_size
    table = {"embedding": _one(f"{prefix}{names.embedding}.weight", vocab, hidden)}
    if config.learned_positions is not None:
        table["positions"] = _one(
            f"{prefix}{names.positions}.weight", config.learned_positions, hidden
        )
    for layer in range(config.num_layers):
        theirs = f"{prefix}{names.layers}.{layer}."
        for name, packed in _layer(config, theirs):
            table[f"layers.{layer}.{name}"] = packed
    table |= _norm(config, "norm", f"{prefix}{names.norm}")
    if not config.tied_head:
        table["head.weight"] = _one(f"{names.head}.weight", vocab, hidden)
    if config.head_bias:
        table["head.bias"] = _one(f"{names.head}.bias", vocab)
    return table


def _layer(config: ModelConfig, theirs: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name in block_norms(config):
        yield from _norm(config, name, theirs + getattr(names, name)).items()

    def linear(
        ours: str, parts: tuple[str, ...], outputs: tuple[int, ...], inputs: int, bias: bool
    ) -> Iterator[tuple[str, Packed]]:
        # One tensor may hold what others keep in several.
        sizes = outputs if len(parts) > 1 else (sum(outputs),)
        pieces = [(theirs + part, size) for part, size in zip(parts, sizes, strict=True)]
        shapes = [(inputs, n) if names.transposed else (n, inputs) for n in sizes]
        yield (
            f"{ours}.weight",
            Packed(
                tuple(
                    Piece(f"{part}.weight", shape)
                    for (part, _), shape in zip(pieces, shapes, strict=True)
                )
            ),
        )
        if bias:
            yield f"{ours}.bias", Packed(tuple(Piece(f"{part}.bias", (n,)) for part, n in pieces))

    yield from linear("attention.qkv", names.qkv, (q, kv, kv), hidden, config.qkv_bias)
    yield from linear("attention.out", (names.out,), (hidden,), q, config.out_bias)
    if config.qk_norm is not None:
        sizes = (config.head_dim, config.head_dim) if config.qk_norm == "head" else (q, kv)
        for ours, name, size in zip(
            ("q_norm", "k_norm"), (names.q_norm, names.k_norm), sizes, strict=True
        ):
            yield f"attention.{ours}", _one(f"{theirs}{name}.weight", size)
    if config.sinks:
        yield "attention.sinks", _one(theirs + names.sinks, config.num_heads)
    up = (inner, inner) if config.gated_mlp else (inner,)
    yield from linear("mlp.up", names.up, up, hidden, config.mlp_bias)
    yield from linear("mlp.down", (names.down,), (hidden,), inner, config.mlp_bias)


def arranged(config: ModelConfig, weights: WeightSource) -> WeightSource:
    """`weights` as the layers take them: linear weights `[out, in]`, the heads of the packed
    projection in order."""
    names = config.names
    linear = re.compile(r"layers\.\d+\.(attention|mlp)\.\w+\.(weight|bias)")

    def arrange(name: str) -> torch.Tensor:
        tensor = weights(name)
        part = linear.fullmatch(name)
        if part is None:
            return tensor
        if names.transposed and part[2] == "weight":
            tensor = tensor.t()
        if names.qkv_by_head and ".qkv." in name:
            heads = tensor.view(config.num_heads, 3, config.head_dim, *tensor.shape[1:])
            tensor = heads.transpose(0, 1).flatten(0, 2)
        return tensor.contiguous()

    return arrange


def ignored_tensor(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this tensor without the model having a place for it: what
    `names.ignored` says, and a tied head's second copy."""
    if config.tied_head and name == f"{config.names.head}.weight":
        return True
    return any(re.fullmatch(pattern, name) for pattern in config.names.ignored)


def _norm(config: ModelConfig, ours: str, theirs: str) -> dict[str, Packed]:
    table = {f"{ours}.weight": _one(f"{theirs}.weight", config.hidden_size)}
    if config.norm == "layer" and config.norm_bias:
        table[f"{ours}.bias"] = _one(f"{theirs}.bias", config.hidden_size)
    return table


def _one(name: str, *shape: int) -> Packed:
    return Packed((Piece(name, shape),))
