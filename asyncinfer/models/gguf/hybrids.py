"""The architectures of GGUF files with layers that keep a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from asyncinfer.models.gguf.architecture import (
    GRANITE_KEYS,
    GROUP_KEYS,
    LATENT_KEYS,
    MOE_KEYS,
    NAMES,
    QWEN_MOE_KEYS,
    GgufArchitecture,
)
from asyncinfer.models.gguf.hybrid_values import (
    delta_values,
    falcon_values,
    granite_hybrid_values,
    kimi_values,
    lfm2_moe_values,
    lfm2_values,
    nemotron_values,
)

__all__ = ["HYBRIDS"]

_LFM2_NAMES: Final = replace(NAMES, norm="token_embd_norm")
_NEMOTRON_NAMES: Final = replace(
    NAMES,
    mlp_norm="attn_norm",
    shared_up=("ffn_up_shexp",),
    expert_up=("ffn_up_exps.{}",),
)
_DELTA_NAMES: Final = replace(NAMES, mlp_norm="post_attention_norm")
_QWEN35_NAMES: Final = replace(
    _DELTA_NAMES, delta_gates=("ssm_beta", "ssm_alpha"), delta_tiled=True
)
_KIMI_NAMES: Final = replace(
    NAMES,
    delta_conv=("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"),
    delta_out="attn_output",
    kimi_forget=("ssm_f_a", "ssm_f_b"),
    kimi_gate=("ssm_g_a", "ssm_g_b"),
    kimi_beta="ssm_beta",
)
_DELTA_KEYS: Final = {
    "full_attention_interval": "full_attention_interval",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
}

HYBRIDS: Final[Mapping[str, GgufArchitecture]] = MappingProxyType(
    {
        "falcon-h1": GgufArchitecture(
            family="FalconH1ForCausalLM", derived=falcon_values, scaled=True
        ),
        "granitehybrid": GgufArchitecture(
            family="GraniteMoeHybridForCausalLM",
            interleaved=True,
            keys={**GRANITE_KEYS, **MOE_KEYS},
            derived=granite_hybrid_values,
        ),
        "kimi-linear": GgufArchitecture(
            family="KimiLinearForCausalLM",
            names=_KIMI_NAMES,
            keys={
                **LATENT_KEYS,
                "linear_head_dim": "kda.head_dim",
                "linear_conv_kernel_dim": "ssm.conv_kernel",
            },
            derived=kimi_values,
        ),
        "lfm2": GgufArchitecture(
            family="Lfm2ForCausalLM",
            names=_LFM2_NAMES,
            keys={"conv_L_cache": "shortconv.l_cache"},
            values={"block_auto_adjust_ff_dim": False},
            derived=lfm2_values,
        ),
        "lfm2moe": GgufArchitecture(
            family="Lfm2MoeForCausalLM",
            names=_LFM2_NAMES,
            keys={
                **MOE_KEYS,
                "conv_L_cache": "shortconv.l_cache",
                "num_experts": "expert_count",
                "num_dense_layers": "leading_dense_block_count",
                "routed_scaling_factor": "expert_weights_scale",
            },
            derived=lfm2_moe_values,
        ),
        "nemotron_h": GgufArchitecture(
            family="NemotronHForCausalLM", names=_NEMOTRON_NAMES, derived=nemotron_values
        ),
        "nemotron_h_moe": GgufArchitecture(
            family="NemotronHForCausalLM",
            names=_NEMOTRON_NAMES,
            keys={
                **MOE_KEYS,
                **GROUP_KEYS,
                "n_shared_experts": "expert_shared_count",
                "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
                "moe_latent_size": "moe_latent_size",
            },
            derived=nemotron_values,
        ),
        "qwen35": GgufArchitecture(
            family="Qwen3_5ForCausalLM",
            names=_QWEN35_NAMES,
            keys=_DELTA_KEYS,
            derived=delta_values,
            changes={"norm": "rms"},
        ),
        "qwen35moe": GgufArchitecture(
            family="Qwen3_5MoeForCausalLM",
            names=_QWEN35_NAMES,
            keys={**_DELTA_KEYS, **QWEN_MOE_KEYS},
            derived=delta_values,
            changes={"norm": "rms"},
        ),
        "qwen3next": GgufArchitecture(
            family="Qwen3NextForCausalLM",
            names=_DELTA_NAMES,
            keys={**_DELTA_KEYS, **QWEN_MOE_KEYS},
            values={"norm_topk_prob": True},
            derived=delta_values,
            changes={"norm": "rms"},
        ),
    }
)
