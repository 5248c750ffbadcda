"""The tensors of feed-forward layers and experts, and how checkpoints store them."""

from __future__ import annotations

from collections.abc import Iterator

from asyncinfer.layers import learned
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import ExpertsConfig
from asyncinfer.models.tensor_parts import linear_tensors, one_tensor
from asyncinfer.weights import Packed, Piece

__all__ = ["feed_forward_tensors"]


def feed_forward_tensors(
    config: ModelConfig, layer: int, stored: str
) -> Iterator[tuple[str, Packed]]:
    """The tensors of one layer, whose names begin with `stored` in the checkpoint."""
    experts = config.layer_experts(layer)
    if not config.layer(layer).feed_forward:
        return
    if experts is None or experts.beside:
        yield from _mlp(config, layer, stored)
    if experts is None:
        return
    if experts.beside:
        for part in ("norm", "out_norm", "dense_norm"):
            name = f"{stored}{getattr(config.names, f'expert_{part}')}.weight"
            yield f"experts.{part}", one_tensor(name, config.hidden_size)
    yield from _router(config, experts, stored)
    yield from _experts(config, experts, stored)
    yield from _shared(config, experts, stored)


def _mlp(config: ModelConfig, layer: int, stored: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, inner = config.names, config.hidden_size, config.layer_intermediate(layer)
    up = (inner, inner) if config.gated_mlp else (inner,)
    yield from linear_tensors(config, stored, "mlp.up", names.up, up, hidden, config.mlp_bias)
    with_weights = learned(config.activation)
    if with_weights is not None:
        for index, (name, shape) in enumerate(with_weights.weights):
            yield f"mlp.activation.{index}", one_tensor(stored + name, *shape)
    down = (names.down,), (hidden,), inner, config.mlp_bias
    yield from linear_tensors(config, stored, "mlp.down", *down)


def _router(
    config: ModelConfig, experts: ExpertsConfig, stored: str
) -> Iterator[tuple[str, Packed]]:
    names, hidden = config.names, config.hidden_size
    if experts.router_norm:
        yield "experts.router_norm", one_tensor(stored + names.router_norm, hidden)
    router = (names.router,), (experts.count,), hidden, experts.router_bias
    yield from linear_tensors(config, stored, "experts.router", *router)
    if experts.expert_scale:
        yield "experts.scale", one_tensor(stored + names.expert_scale, experts.count)
    if experts.shared_gate:
        gate = (names.shared_gate,), (1,), hidden, False
        yield from linear_tensors(config, stored, "experts.shared_gate", *gate)
    if experts.correction:
        # float32, since scores may differ by less than a 16-bit step.
        pieces = one_tensor(stored + names.correction, experts.count).pieces
        yield "experts.correction", Packed(pieces, "float32")


def _experts(
    config: ModelConfig, experts: ExpertsConfig, stored: str
) -> Iterator[tuple[str, Packed]]:
    names, hidden, size = config.names, config.hidden_size, experts.intermediate_size
    for name, parts, outputs, inputs in (
        ("experts.up", names.expert_up, size, hidden),
        ("experts.down", (names.expert_down,), hidden, size),
    ):
        if "{}" not in parts[0]:
            outputs *= 2 if name == "experts.up" and config.gated_mlp else 1
            (part,) = parts
            shape = (outputs, inputs) if names.expert_outputs_first else (inputs, outputs)
            yield f"{name}.weight", one_tensor(stored + part, experts.count, *shape)
            if experts.bias:
                yield f"{name}.bias", one_tensor(f"{stored}{part}_bias", experts.count, outputs)
            continue
        if len(parts) == 1 and name == "experts.up" and config.gated_mlp:
            outputs *= 2
        each = [stored + part.format(number) for number in range(experts.count) for part in parts]
        pieces = tuple(Piece(f"{part}.weight", (outputs, inputs)) for part in each)
        yield f"{name}.weight", Packed(pieces)
        if experts.bias:
            yield f"{name}.bias", Packed(tuple(Piece(f"{part}.bias", (outputs,)) for part in each))


def _shared(
    config: ModelConfig, experts: ExpertsConfig, stored: str
) -> Iterator[tuple[str, Packed]]:
    names, size = config.names, experts.shared_size
    if size:
        sizes = (size, size) if config.gated_mlp else (size,)
        up = names.shared_up, sizes, config.hidden_size, config.mlp_bias
        yield from linear_tensors(config, stored, "shared.up", *up)
        down = (names.shared_down,), (config.hidden_size,), size, config.mlp_bias
        yield from linear_tensors(config, stored, "shared.down", *down)
