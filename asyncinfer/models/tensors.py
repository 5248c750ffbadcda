"""The tensors of a decoder, and how a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncinfer.layers import learned
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.names import PredictorNames
from asyncinfer.models.parts import (
    GatedDeltaConfig,
    LatentConfig,
    MambaConfig,
    ShortConvConfig,
)
from asyncinfer.weights import Packed, Piece

__all__ = ["block_norms", "tensor_table"]

_NORMS = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "sandwich": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "parallel": ("attention_norm", "mlp_norm"),
    "parallel-shared": ("attention_norm",),
}


def block_norms(config: ModelConfig, index: int) -> tuple[str, ...]:
    """The norms of the layer `index`, by their names in the tensor table."""
    layer = config.layer(index)
    there = {"attention": layer.attends or layer.mixer is not None, "mlp": layer.feed_forward}
    return tuple(
        norm for norm in _NORMS[config.layer_block(index)] if there[norm.partition("_")[0]]
    )


def tensor_table(config: ModelConfig) -> dict[str, Packed]:
    """The model's tensors by name, in the order of loading. Each is one tensor of the checkpoint,
    or several concatenated along dimension 0."""
    names, hidden = config.names, config.hidden_size
    prefix, vocab = names.prefix, config.vocab_size
    table = {"embedding": _one(f"{prefix}{names.embedding}.weight", vocab, hidden)}
    learned = config.learned_positions
    if learned is not None:
        table["positions"] = _one(f"{prefix}{names.positions}.weight", learned, hidden)
    if config.per_layer_inputs:
        size = config.num_layers * config.per_layer_inputs
        for ours, name, shape in (
            ("embedding", names.per_layer_embedding, (vocab, size)),
            ("projection.weight", names.per_layer_projection, (size, hidden)),
            ("norm", names.per_layer_norm, (config.per_layer_inputs,)),
        ):
            table[f"per_layer.{ours}"] = _one(f"{prefix}{name}.weight", *shape)
    for layer in range(config.num_layers):
        theirs = f"{prefix}{names.layers}.{layer}."
        if names.predictor is not None and config.predicts and layer == config.num_layers - 1:
            theirs = f"{names.predictor.prefix}{names.predictor.layer}"
            table |= _predictor(config, names.predictor, f"layers.{layer}.predictor")
        for name, packed in (
            *_attention(config, layer, theirs),
            *_mlp(config, layer, theirs),
            *_shared(config, layer, theirs),
            *_after(config, theirs),
        ):
            table[f"layers.{layer}.{name}"] = packed
    table |= _norm(config, "norm", f"{prefix}{names.norm}")
    if not config.tied_head:
        table["head.weight"] = _one(f"{names.head}.weight", vocab, hidden)
    if config.head_bias:
        table["head.bias"] = _one(f"{names.head}.bias", vocab)
    return table


def _attention(config: ModelConfig, layer: int, theirs: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, own = config.names, config.hidden_size, config.layer(layer)
    head_dim = config.layer_kv(layer).head_dim
    q, kv = config.num_heads * head_dim, config.layer_kv(layer).num_kv_heads * head_dim
    queries = 2 * q if config.attention_gate else q
    for name in block_norms(config, layer):
        yield from _norm(config, name, theirs + getattr(names, name)).items()

    mixer = config.layer(layer).mixer
    if isinstance(mixer, GatedDeltaConfig):
        yield from _delta(config, mixer, theirs)
    elif isinstance(mixer, MambaConfig):
        yield from _mamba(config, mixer, theirs)
    elif mixer is not None:
        yield from _convolution(config, mixer, theirs)
    if not config.layer(layer).attends:
        return
    if config.latent is not None:
        yield from _latent(config, config.latent, theirs)
        return
    # A layer may have queries alone, or no values.
    parts = 1 if own.shares_kv is not None else 2 if own.keys_as_values else 3
    qkv = names.qkv[:parts], (queries, kv, kv)[:parts], hidden, config.qkv_bias
    yield from _linear(config, theirs, "attention.qkv", *qkv)
    yield from _linear(config, theirs, "attention.out", (names.out,), (hidden,), q, config.out_bias)
    if config.qk_norm is not None and config.norm_weight:
        sizes = (head_dim, head_dim) if config.qk_norm != "projection" else (q, kv)
        norms = (("q_norm", names.q_norm, sizes[0]), ("k_norm", names.k_norm, sizes[1]))
        for ours, name, size in norms[: 1 if own.shares_kv is not None else 2]:
            yield f"attention.{ours}", _one(f"{theirs}{name}.weight", size)
    if config.sinks:
        yield "attention.sinks", _one(theirs + names.sinks, config.num_heads)


def _convolution(
    config: ModelConfig, mixer: ShortConvConfig, theirs: str
) -> Iterator[tuple[str, Packed]]:
    names, hidden, bias = config.names, config.hidden_size, mixer.bias
    yield from _linear(config, theirs, "mixer.in", (names.conv_in,), (3 * hidden,), hidden, bias)
    yield "mixer.conv.weight", _one(f"{theirs}{names.conv}.weight", hidden, 1, mixer.width)
    if bias:
        yield "mixer.conv.bias", _one(f"{theirs}{names.conv}.bias", hidden)
    yield from _linear(config, theirs, "mixer.out", (names.conv_out,), (hidden,), hidden, bias)


def _delta(
    config: ModelConfig, mixer: GatedDeltaConfig, theirs: str
) -> Iterator[tuple[str, Packed]]:
    names, hidden, inner = config.names, config.hidden_size, mixer.heads * mixer.value_dim
    keys = mixer.key_heads * mixer.key_dim
    apart = (keys, keys, inner)
    sizes = (*apart, inner) if len(names.delta_in) == 4 else (mixer.channels, inner)
    yield from _linear(config, theirs, "mixer.in", names.delta_in, sizes, hidden, False)
    gates = names.delta_gates, (mixer.heads, mixer.heads), hidden, False
    yield from _linear(config, theirs, "mixer.gates", *gates)
    rows = names.delta_conv_rows or (apart if len(names.delta_conv) == 3 else (mixer.channels,))
    conv = zip(names.delta_conv, rows, strict=True)
    pieces = (Piece(f"{theirs}{part}.weight", (n, 1, mixer.width)) for part, n in conv)
    yield "mixer.conv.weight", Packed(tuple(pieces))
    for ours, name in (("rate", names.delta_rate), ("bias", names.delta_bias)):
        # float32: an error in how fast a state decays grows with the tokens.
        yield f"mixer.{ours}", Packed(_one(theirs + name, mixer.heads).pieces, torch.float32)
    yield "mixer.norm", _one(f"{theirs}{names.delta_norm}.weight", mixer.value_dim)
    yield from _linear(config, theirs, "mixer.out", (names.delta_out,), (hidden,), inner, False)


def _mamba(config: ModelConfig, mixer: MambaConfig, theirs: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, inner, channels = config.names, config.hidden_size, mixer.inner, mixer.channels
    inputs = (names.mamba_in,), (inner + channels + mixer.heads,), hidden, mixer.in_bias
    yield from _linear(config, theirs, "mixer.in", *inputs)
    yield "mixer.conv.weight", _one(f"{theirs}{names.mamba_conv}.weight", channels, 1, mixer.width)
    if mixer.conv_bias:
        yield "mixer.conv.bias", _one(f"{theirs}{names.mamba_conv}.bias", channels)
    for ours in ("rate", "bias", "skip"):
        name = getattr(names, f"mamba_{ours}")
        # float32: an error in how fast a state decays grows with the tokens.
        yield f"mixer.{ours}", Packed(_one(theirs + name, mixer.heads).pieces, torch.float32)
    if mixer.norm is not None:
        yield "mixer.norm", _one(f"{theirs}{names.mamba_norm}.weight", inner)
    out = (names.mamba_out,), (hidden,), inner, mixer.out_bias
    yield from _linear(config, theirs, "mixer.out", *out)


def _latent(config: ModelConfig, latent: LatentConfig, theirs: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, heads = config.names, config.hidden_size, config.num_heads
    bias = config.qkv_bias
    last, inputs = names.qkv[0], hidden
    if latent.query_rank is not None:
        last, inputs = names.query_up, latent.query_rank
        down = (names.query_down,), (inputs,), hidden, bias
        yield from _linear(config, theirs, "attention.query_down", *down)
        yield "attention.query_norm", _one(f"{theirs}{names.query_norm}.weight", inputs)
    queries = heads * (latent.plain + latent.rotated)
    yield from _linear(config, theirs, "attention.query", (last,), (queries,), inputs, False)
    down = (names.kv_down,), (latent.kv_rank + latent.rotated,), hidden, bias
    yield from _linear(config, theirs, "attention.kv_down", *down)
    yield "attention.kv_norm", _one(f"{theirs}{names.kv_norm}.weight", latent.kv_rank)
    if len(names.kv_up) == 2:
        keys, values = (f"{theirs}{name}.weight" for name in names.kv_up)
        yield "attention.key_up.weight", _one(keys, heads, latent.kv_rank, latent.plain)
        yield "attention.value_up.weight", _one(values, heads, latent.value, latent.kv_rank)
    else:
        up = names.kv_up, (heads * (latent.plain + latent.value),), latent.kv_rank, False
        yield from _linear(config, theirs, "attention.kv_up", *up)
    out = (names.out,), (hidden,), heads * latent.value, config.out_bias
    yield from _linear(config, theirs, "attention.out", *out)


def _mlp(config: ModelConfig, layer: int, theirs: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, inner = config.names, config.hidden_size, config.layer_intermediate(layer)
    experts = config.layer_experts(layer)
    if not config.layer(layer).feed_forward:
        return
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
    if experts.shared_gate:
        gate = (names.shared_gate,), (1,), hidden, False
        yield from _linear(config, theirs, "experts.shared_gate", *gate)
    if experts.correction:
        # float32, since scores may differ by less than a 16-bit step.
        pieces = _one(theirs + names.correction, experts.count).pieces
        yield "experts.correction", Packed(pieces, torch.float32)
    for ours, parts, outputs, inputs in (
        ("experts.up", names.expert_up, size, hidden),
        ("experts.down", (names.expert_down,), hidden, size),
    ):
        if "{}" not in parts[0]:
            outputs *= 2 if ours == "experts.up" and config.gated_mlp else 1
            (part,) = parts
            shape = (outputs, inputs) if names.expert_outputs_first else (inputs, outputs)
            yield f"{ours}.weight", _one(theirs + part, experts.count, *shape)
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
        sizes = (size, size) if config.gated_mlp else (size,)
        up = names.shared_up, sizes, config.hidden_size, config.mlp_bias
        yield from _linear(config, theirs, "shared.up", *up)
        down = (names.shared_down,), (config.hidden_size,), size, config.mlp_bias
        yield from _linear(config, theirs, "shared.down", *down)


def _predictor(config: ModelConfig, names: PredictorNames, ours: str) -> dict[str, Packed]:
    """What the layer that predicts a further token has beside the layer's own tensors."""
    table: dict[str, Packed] = {}
    for part in ("token_norm", "hidden_norm", "norm"):
        table |= _norm(config, f"{ours}.{part}", f"{names.prefix}{getattr(names, part)}")
    join = (names.join,), (config.hidden_size,), 2 * config.hidden_size, False
    return table | dict(_linear(config, names.prefix, f"{ours}.join", *join))


def _after(config: ModelConfig, theirs: str) -> Iterator[tuple[str, Packed]]:
    """What follows a layer's feed-forward layer."""
    names, hidden, size = config.names, config.hidden_size, config.per_layer_inputs
    if size:
        for ours, name, shape in (
            ("gate.weight", names.per_layer_gate, (size, hidden)),
            ("out.weight", names.per_layer_out, (hidden, size)),
            ("norm", names.per_layer_out_norm, (hidden,)),
        ):
            yield f"per_layer.{ours}", _one(f"{theirs}{name}.weight", *shape)
    if config.layer_scale:
        yield "scale", _one(theirs + names.layer_scale, 1)


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


def _norm(config: ModelConfig, ours: str, theirs: str) -> dict[str, Packed]:
    if not config.norm_weight:
        return {}
    table = {f"{ours}.weight": _one(f"{theirs}.weight", config.hidden_size)}
    if config.norms_have_bias:
        table[f"{ours}.bias"] = _one(f"{theirs}.bias", config.hidden_size)
    return table


def _one(name: str, *shape: int) -> Packed:
    return Packed((Piece(name, shape),))
