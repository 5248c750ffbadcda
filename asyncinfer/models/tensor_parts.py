"""Parts of the tensor table that all kinds of layers have: linear layers and norms."""

from __future__ import annotations

from collections.abc import Iterator

from asyncinfer.models.config import ModelConfig
from asyncinfer.weights import Packed, Piece

__all__ = ["linear_tensors", "norm_tensors", "one_tensor"]


def linear_tensors(
    config: ModelConfig,
    stored: str,
    name: str,
    parts: tuple[str, ...],
    outputs: tuple[int, ...],
    inputs: int,
    bias: bool,
) -> Iterator[tuple[str, Packed]]:
    # Some checkpoints hold all parts in one tensor.
    sizes = outputs if len(parts) > 1 else (sum(outputs),)
    pieces = [(stored + part, size) for part, size in zip(parts, sizes, strict=True)]
    turned = config.names.transposed
    yield (
        f"{name}.weight",
        Packed(
            tuple(
                Piece(f"{part}.weight", (inputs, n) if turned else (n, inputs))
                for part, n in pieces
            )
        ),
    )
    if bias:
        yield f"{name}.bias", Packed(tuple(Piece(f"{part}.bias", (n,)) for part, n in pieces))


def norm_tensors(config: ModelConfig, name: str, stored: str) -> dict[str, Packed]:
    if not config.norm_weight:
        return {}
    table = {f"{name}.weight": one_tensor(f"{stored}.weight", config.hidden_size)}
    if config.norms_have_bias:
        table[f"{name}.bias"] = one_tensor(f"{stored}.bias", config.hidden_size)
    return table


def one_tensor(name: str, *shape: int) -> Packed:
    return Packed((Piece(name, shape),))
