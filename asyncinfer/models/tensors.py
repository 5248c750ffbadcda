"""The tensors of a decoder, and how a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Iterator

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.feed_forward_tensors import feed_forward_tensors
from asyncinfer.models.mixer_tensors import mixer_tensors
from asyncinfer.models.names import PredictorNames
from asyncinfer.models.parts import IndexerConfig, LatentConfig
from asyncinfer.models.tensor_parts import linear_tensors, norm_tensors, one_tensor
from asyncinfer.weights import Packed

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
    table = {"embedding": one_tensor(f"{prefix}{names.embedding}.weight", vocab, hidden)}
    learned = config.learned_positions
    if learned is not None:
        table["positions"] = one_tensor(f"{prefix}{names.positions}.weight", learned, hidden)
    if config.per_layer_inputs:
        size = config.num_layers * config.per_layer_inputs
        for part, name, shape in (
            ("embedding", names.per_layer_embedding, (vocab, size)),
            ("projection.weight", names.per_layer_projection, (size, hidden)),
            ("norm", names.per_layer_norm, (config.per_layer_inputs,)),
        ):
            table[f"per_layer.{part}"] = one_tensor(f"{prefix}{name}.weight", *shape)
    for layer in range(config.num_layers):
        stored = f"{prefix}{names.layers}.{layer}."
        if names.predictor is not None and config.predicts and layer == config.num_layers - 1:
            stored = f"{names.predictor.prefix}{names.predictor.layer}"
            table |= _predictor(config, names.predictor, f"layers.{layer}.predictor")
        for name, packed in (
            *_attention(config, layer, stored),
            *feed_forward_tensors(config, layer, stored),
            *_after(config, stored),
        ):
            table[f"layers.{layer}.{name}"] = packed
    table |= norm_tensors(config, "norm", f"{prefix}{names.norm}")
    if not config.tied_head:
        table["head.weight"] = one_tensor(f"{names.head}.weight", vocab, hidden)
    if config.head_bias:
        table["head.bias"] = one_tensor(f"{names.head}.bias", vocab)
    return table


def _attention(config: ModelConfig, layer: int, stored: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, own = config.names, config.hidden_size, config.layer(layer)
    head_dim = config.layer_kv(layer).head_dim
    q, kv = config.num_heads * head_dim, config.layer_kv(layer).num_kv_heads * head_dim
    for name in block_norms(config, layer):
        yield from norm_tensors(config, name, stored + getattr(names, name)).items()

    mixer = config.layer(layer).mixer
    if mixer is not None:
        yield from mixer_tensors(config, mixer, stored)
    if not config.layer(layer).attends:
        return
    if config.latent is not None:
        yield from _latent(config, config.latent, stored)
        return
    sizes = (q, q, kv, kv) if len(names.qkv) == 4 else (q * (1 + config.attention_gate), kv, kv)
    # A layer may have queries alone, or no values.
    parts = len(sizes) - (2 if own.shares_kv is not None else own.keys_as_values)
    qkv = names.qkv[:parts], sizes[:parts], hidden, config.qkv_bias
    yield from linear_tensors(config, stored, "attention.qkv", *qkv)
    yield from linear_tensors(
        config, stored, "attention.out", (names.out,), (hidden,), q, config.out_bias
    )
    if config.qk_norm is not None and config.qk_norm_weighted and own.qk_norm:
        of_q, of_k = (head_dim, head_dim) if config.qk_norm != "projection" else (q, kv)
        norms = (("q_norm", names.q_norm, of_q), ("k_norm", names.k_norm, of_k))
        for part, name, size in norms[: 1 if own.shares_kv is not None else 2]:
            yield f"attention.{part}", one_tensor(f"{stored}{name}.weight", size)
    if config.sinks:
        yield "attention.sinks", one_tensor(stored + names.sinks, config.num_heads)


def _latent(config: ModelConfig, latent: LatentConfig, stored: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, heads = config.names, config.hidden_size, config.num_heads
    bias = config.qkv_bias
    last, inputs = names.qkv[0], hidden
    if latent.query_rank is not None:
        last, inputs = names.query_up, latent.query_rank
        down = (names.query_down,), (inputs,), hidden, bias
        yield from linear_tensors(config, stored, "attention.query_down", *down)
        yield "attention.query_norm", one_tensor(f"{stored}{names.query_norm}.weight", inputs)
        if latent.indexer is not None:
            yield from _indexer(config, latent.indexer, inputs, stored)
    queries = heads * (latent.plain + latent.rotated)
    yield from linear_tensors(config, stored, "attention.query", (last,), (queries,), inputs, False)
    down = (names.kv_down,), (latent.kv_rank + latent.rotated,), hidden, bias
    yield from linear_tensors(config, stored, "attention.kv_down", *down)
    yield "attention.kv_norm", one_tensor(f"{stored}{names.kv_norm}.weight", latent.kv_rank)
    if len(names.kv_up) == 2:
        keys, values = (f"{stored}{name}.weight" for name in names.kv_up)
        yield "attention.key_up.weight", one_tensor(keys, heads, latent.kv_rank, latent.plain)
        yield "attention.value_up.weight", one_tensor(values, heads, latent.value, latent.kv_rank)
    else:
        up = names.kv_up, (heads * (latent.plain + latent.value),), latent.kv_rank, False
        yield from linear_tensors(config, stored, "attention.kv_up", *up)
    out = (names.out,), (hidden,), heads * latent.value, config.out_bias
    yield from linear_tensors(config, stored, "attention.out", *out)


def _indexer(
    config: ModelConfig, indexer: IndexerConfig, inputs: int, stored: str
) -> Iterator[tuple[str, Packed]]:
    names, hidden, size = config.names, config.hidden_size, indexer.size
    query = (names.index_query,), (indexer.heads * size,), inputs, False
    yield from linear_tensors(config, stored, "attention.index_query", *query)
    key = (names.index_key,), (size,), hidden, False
    yield from linear_tensors(config, stored, "attention.index_key", *key)
    for part in ("weight", "bias"):
        yield f"attention.index_norm.{part}", one_tensor(f"{stored}{names.index_norm}.{part}", size)
    # float32, since scores may differ by less than a 16-bit step.
    weights = one_tensor(f"{stored}{names.index_weights}.weight", indexer.heads, hidden)
    yield "attention.index_weights", Packed(weights.pieces, "float32")


def _predictor(config: ModelConfig, names: PredictorNames, name: str) -> dict[str, Packed]:
    """Tensors of the layer that predicts a further token, besides those of every layer."""
    table: dict[str, Packed] = {}
    for part in ("token_norm", "hidden_norm", "norm"):
        table |= norm_tensors(config, f"{name}.{part}", f"{names.prefix}{getattr(names, part)}")
    join = (names.join,), (config.hidden_size,), 2 * config.hidden_size, False
    return table | dict(linear_tensors(config, names.prefix, f"{name}.join", *join))


def _after(config: ModelConfig, stored: str) -> Iterator[tuple[str, Packed]]:
    """Tensors that follow a layer's feed-forward part."""
    names, hidden, size = config.names, config.hidden_size, config.per_layer_inputs
    if size:
        for part, name, shape in (
            ("gate.weight", names.per_layer_gate, (size, hidden)),
            ("out.weight", names.per_layer_out, (hidden, size)),
            ("norm", names.per_layer_out_norm, (hidden,)),
        ):
            yield f"per_layer.{part}", one_tensor(f"{stored}{name}.weight", *shape)
    if config.layer_scale:
        yield "scale", one_tensor(stored + names.layer_scale, 1)
