"""Phi-3.5-MoE (Abdin et al., 2024): Mixtral with layer norms, and two experts by SparseMixer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.mixtral import Mixtral
from asyncinfer.models.reader import JsonReader

__all__ = ["PhiMoE"]

_MSCALE = (1e-3, 1e3)


class PhiMoE(Mixtral):
    """Phi-3.5-MoE: layer norms, two experts by SparseMixer, LongRoPE."""

    model_type = "phimoe"
    defaults: ClassVar = {
        **Mixtral.defaults,
        "num_local_experts": 16,
        "router_jitter_noise": 0.01,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = super().configure(config, replace(llama, rope=_rope(config, llama)))
        assert base.experts is not None
        if base.experts.active != 2:
            raise config.refuse("num_experts_per_tok", "must be 2")
        experts = replace(
            base.experts,
            normalise=False,
            scoring="sparse-mixer",
            jitter=config.number("router_jitter_noise", 1e-6, 1.0),
        )
        return replace(
            base,
            norm="layer",
            mlp_bias=False,
            head_bias=config.boolean("lm_head_bias", False),
            experts=experts,
        )


def _rope(config: JsonReader, llama: ModelConfig) -> RopeConfig:
    """The rotation; it is multiplied by numbers that `config.json` states."""
    rope = llama.rope
    assert rope is not None
    if rope.rope_type == "default":
        return rope
    stated = config.object("rope_scaling") or config.object("rope_parameters")
    assert stated is not None
    if rope.rope_type != "longrope":
        raise stated.refuse("rope_type", "must be longrope")
    short = stated.number("short_mscale", *_MSCALE)
    if stated.number("long_mscale", *_MSCALE) != short:
        raise stated.refuse("long_mscale", f"must be short_mscale={short:g}")
    return replace(rope, attention_factor=short)
