"""Nemotron-H and Nemotron 3 (NVIDIA, 2025): each layer is Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.mamba import layer_kinds
from asyncinfer.models.nemotron_h_layers import (
    nemotron_experts,
    nemotron_mixer,
    nemotron_names,
)
from asyncinfer.models.parts import LayerConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import FULL

__all__ = ["NemotronH"]

_LINEAR, _MLP, _EXPERTS = "linear_attention", "mlp", "moe"
_KINDS, _PATTERN = "layers_block_type", "hybrid_override_pattern"
#: The letters of `hybrid_override_pattern`.
_LETTERS = {"M": _LINEAR, "E": _EXPERTS, "*": FULL, "-": _MLP}


class NemotronH(Family):
    """Nemotron-H and Nemotron 3 Nano, such as NVIDIA-Nemotron-Nano-9B-v2. Its part that predicts
    further tokens is left out."""

    model_type = "nemotron_h"
    keys: ClassVar = {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"}
    defaults: ClassVar = {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21_504,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
    }

    def complete(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        whole = {**super().complete(values)}
        pattern = whole.get(_PATTERN)
        kinds = whole.get(_KINDS) or whole.get("layer_types")
        if not kinds and isinstance(pattern, str):
            kinds = [_LETTERS.get(letter, letter) for letter in pattern]
        if isinstance(kinds, list):
            # Older versions of transformers need `num_hidden_layers`.
            whole |= {_KINDS: kinds, "num_hidden_layers": len(kinds)}
        return whole

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if config.has("moe_latent_size"):
            raise config.refuse("moe_latent_size", "is not supported: experts of a smaller state")
        count = llama.num_layers
        kinds = layer_kinds(config, _KINDS, count, (_LINEAR, FULL, _MLP, _EXPERTS))
        layers = {
            FULL: LayerConfig(rope=None, feed_forward=False),
            _MLP: LayerConfig(rope=None, attention=False, experts=False),
            _EXPERTS: LayerConfig(rope=None, attention=False),
        }
        if _LINEAR in kinds:
            layers[_LINEAR] = LayerConfig(
                rope=None, mixer=nemotron_mixer(config), feed_forward=False
            )
        return replace(
            llama,
            rope=None,
            gated_mlp=False,
            # Keys that are there but have no effect.
            tied_head=False,
            qkv_bias=False,
            out_bias=False,
            experts=nemotron_experts(config, llama) if _EXPERTS in kinds else None,
            layers=tuple(layers[kind] for kind in kinds),
            names=nemotron_names(),
        )
