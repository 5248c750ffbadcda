"""Checks of a layer's own settings against the rest of a decoder."""

from __future__ import annotations

from collections.abc import Sequence

from asyncinfer.layers import RopeConfig, refuse
from asyncinfer.models.parts import LatentConfig, LayerConfig

__all__ = ["check_rope", "check_shared_kv"]


def check_rope(
    owner: object,
    rope: RopeConfig | None,
    head_dim: int,
    latent: LatentConfig | None,
    attention_gate: bool,
) -> None:
    """Raise `ValueError` for a rotation that the heads of the config `owner` cannot have."""
    if latent is not None and rope is not None and rope.size != latent.rotated:
        raise refuse(owner, "rope", f"must have the size {latent.rotated} of latent")
    if rope is None:
        return
    if rope.interleaved and attention_gate:
        raise refuse(owner, "attention_gate", "must be False with an interleaved rope")
    if rope.interleaved and latent is not None:
        raise refuse(owner, "rope", "must not be interleaved with latent, which says that itself")
    size = rope.size or head_dim
    if size > head_dim:
        raise refuse(owner, "rope", f"must have a size of head_dim={head_dim} at most")
    # `RopeConfig` cannot check a rotation of whole heads, since it does not know their size.
    if size % 2 or (size < 4 and rope.rope_type == "dynamic"):
        raise refuse(owner, "head_dim", f"cannot be rotated by rope_type={rope.rope_type!r}")
    factors = (rope.factors, rope.long_factors)
    if rope.rope_type == "longrope" and any(len(part) != size // 2 for part in factors):
        raise refuse(owner, "rope", f"must have {size // 2} factors and as many long_factors")


def check_shared_kv(owner: object, num_heads: int, layers: Sequence[LayerConfig]) -> None:
    """Raise `ValueError` for impossible shared keys and values in the config `owner`."""
    for index, layer in enumerate(layers):
        if layer.num_kv_heads is not None and num_heads % layer.num_kv_heads:
            bound = f"num_kv_heads of layer {index} must divide num_heads={num_heads}"
            raise refuse(owner, "layers", bound)
        if layer.shares_kv is None:
            continue
        if layer.shares_kv >= index:
            raise refuse(owner, "layers", f"shares_kv of layer {index} must be a layer before it")
        source = layers[layer.shares_kv]
        if not source.attends or source.shares_kv is not None:
            raise refuse(owner, "layers", f"shares_kv of layer {index} must have KV of its own")
        for part in ("window", "chunked", "head_dim", "num_kv_heads", "rope"):
            if getattr(source, part) != getattr(layer, part):
                bound = f"{part} of layer {index} must be that of layer {layer.shares_kv}"
                raise refuse(owner, "layers", bound)
