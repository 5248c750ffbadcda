"""Falcon-H1 (TII, 2025): Mamba-2 beside attention in every layer, and multipliers everywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from asyncinfer.layers import Activation, activation
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.mamba import read_mamba
from asyncinfer.models.names import TensorNames
from asyncinfer.models.parts import MOST_WIDTH, LayerConfig, MambaConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["FalconH1"]

_MULTIPLIER = (1e-6, 1e6)


@dataclass(frozen=True, slots=True)
class _Scaled:
    """`outer * function(inner * x)`."""

    function: Activation
    inner: float
    outer: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.inner) * self.outer


class FalconH1(Family):
    """Falcon-H1, such as Falcon-H1-1.5B-Deep-Instruct."""

    model_type = "falcon_h1"
    defaults: ClassVar = {
        "vocab_size": 128_000,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "projectors_bias": False,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        def multiplier(name: str) -> float:
            return config.number(f"{name}_multiplier", *_MULTIPLIER, 1.0)

        # A rotation is linear, so factors of queries and keys can be applied to the scores.
        given, keys, out = (multiplier(f) for f in ("attention_in", "key", "attention_out"))
        if llama.qkv_bias and (given, keys, out) != (1.0, 1.0, 1.0):
            raise config.refuse("attention_bias", "is not supported with multipliers of attention")
        gate, down = 1.0, 1.0
        if config.has("mlp_multipliers"):
            gate, down = config.numbers("mlp_multipliers", 2, *_MULTIPLIER)
        if llama.mlp_bias and down != 1.0:
            raise config.refuse("mlp_bias", "is not supported with mlp_multipliers")
        chosen = llama.activation
        if (gate, down) != (1.0, 1.0):
            chosen = _Scaled(activation(chosen, gated=False), gate, down)
        layer = LayerConfig(rope=llama.rope, mixer=_mixer(config, llama), attention=True)
        return replace(
            llama,
            activation=chosen,
            embedding_scale=multiplier("embedding"),
            attention_scale=given**2 * keys / math.sqrt(llama.head_dim),
            attention_out_scale=given * out,
            logit_scale=multiplier("lm_head"),
            layers=(layer,) * llama.num_layers,
            names=TensorNames(
                mlp_norm="pre_ff_layernorm",
                up=("feed_forward.gate_proj", "feed_forward.up_proj"),
                down="feed_forward.down_proj",
                norm="final_layernorm",
            ),
        )


def _mixer(config: JsonReader, llama: ModelConfig) -> MambaConfig:
    # Null means `mamba_expand` times the dimensions of the hidden state.
    inner = None
    if config.has("mamba_d_ssm"):
        inner = config.integer("mamba_d_ssm", 1, MOST_WIDTH)
    first = config.boolean("mamba_norm_before_gate")
    normed = config.boolean("mamba_rms_norm")
    scales: tuple[float, ...] = (1.0,) * 5
    if config.has("ssm_multipliers"):
        scales = config.numbers("ssm_multipliers", 5, *_MULTIPLIER)
    given = config.number("ssm_in_multiplier", *_MULTIPLIER, 1.0)
    mixer = read_mamba(config, llama, inner)
    if mixer.in_bias and given != 1.0:
        raise config.refuse("mamba_proj_bias", "is not supported with ssm_in_multiplier")
    out_bias = config.boolean("projectors_bias")
    out_scale = config.number("ssm_out_multiplier", *_MULTIPLIER, 1.0)
    if out_bias and out_scale != 1.0:
        raise config.refuse("projectors_bias", "is not supported with ssm_out_multiplier")
    return replace(
        mixer,
        out_bias=out_bias,
        norm=("norm-first" if first else "gate-first") if normed else None,
        in_scales=tuple(given * scale for scale in scales),
        out_scale=out_scale,
    )
