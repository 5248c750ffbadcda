"""Kimi Linear (Moonshot AI, 2025): Kimi Delta Attention in most layers, latent attention without a
rotation in the others, and many small experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.deepseek_v3 import DeepSeekV3
from asyncinfer.models.kimi_linear_layers import OWN, kimi_layers
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["KimiLinear"]

#: Published keys in there -> transformers' keys.
_LINEAR_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


_MOE = "block_sparse_moe"
_NAMES = TensorNames(
    mlp_modules=("mlp", _MOE),
    router=f"{_MOE}.gate",
    correction=f"{_MOE}.gate.e_score_correction_bias",
    expert_up=(f"{_MOE}.experts.{{}}.w1", f"{_MOE}.experts.{{}}.w3"),
    expert_down=f"{_MOE}.experts.{{}}.w2",
    shared_up=(f"{_MOE}.shared_experts.gate_proj", f"{_MOE}.shared_experts.up_proj"),
    shared_down=f"{_MOE}.shared_experts.down_proj",
    delta_conv=tuple(f"self_attn.{part}_conv1d" for part in "qkv"),
    delta_rate="self_attn.A_log",
    delta_bias="self_attn.dt_bias",
    delta_norm="self_attn.o_norm",
    delta_out="self_attn.o_proj",
)


class KimiLinear(DeepSeekV3):
    """Kimi Linear: Kimi Delta Attention, latent attention without a rotation, experts."""

    model_type = "kimi_linear"
    keys: ClassVar = {
        "head_dim": "qk_rope_head_dim",
        "max_position_embeddings": "model_max_length",
        "n_group": "num_expert_group",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
    }
    defaults: ClassVar = {
        "model_max_length": 1_048_576,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "rope_interleave": False,
        "num_nextn_predict_layers": 0,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    }

    def complete(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """With what published configs say in `linear_attn_config` under transformers' keys."""
        own = values.get(OWN)
        said = own if isinstance(own, Mapping) else {}
        theirs = {ours: said[key] for key, ours in _LINEAR_KEYS.items() if key in said}
        return {**super().complete(values), **theirs}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if llama.tied_head:
            raise config.refuse("tie_word_embeddings", "must be false: Kimi Linear has a head")
        base = super().configure(config, llama)
        return replace(base, rope=None, layers=kimi_layers(config, llama.num_layers), names=_NAMES)
