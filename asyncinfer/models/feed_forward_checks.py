"""Checks of fields of a decoder's feed-forward layers that depend on each other."""

from __future__ import annotations

from collections.abc import Collection

from asyncinfer.layers import refuse
from asyncinfer.models.names import TensorNames
from asyncinfer.models.parts import ExpertsConfig

__all__ = ["check_feed_forward"]


def check_feed_forward(
    owner: object,
    names: TensorNames,
    experts: ExpertsConfig | None,
    gated: bool,
    kinds: Collection[bool],
) -> None:
    """Raise `ValueError` for impossible feed-forward layers or experts of the config `owner`.
    `kinds`: True if some layers have experts, False if some have a plain feed-forward layer."""
    if False in kinds:
        if not gated and len(names.up) > 1:
            raise refuse(owner, "names", "up must be one name where gated_mlp is False")
        if names.transposed and len(names.up) > 1:
            raise refuse(owner, "names", "transposed needs one name in up")
    shared = experts is not None and experts.shared_size
    if shared and names.transposed and len(names.shared_up) > 1:
        raise refuse(owner, "names", "transposed needs one name in shared_up")
    if experts is None or gated:
        return
    if experts.clamped_swiglu is not None:
        raise refuse(owner, "gated_mlp", "must be True with clamped_swiglu")
    if len(names.expert_up) > 1 or (shared and len(names.shared_up) > 1):
        bound = "expert_up and shared_up must be one name each where gated_mlp is False"
        raise refuse(owner, "names", bound)
    if names.expert_up_alternates:
        raise refuse(owner, "names", "expert_up_alternates must be False without gated_mlp")
