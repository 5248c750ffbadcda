"""`GgufArchitecture`: how the GGUF files of one architecture differ, and what several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from asyncinfer.models.gguf.facts import Facts
from asyncinfer.models.names import TensorNames

__all__ = [
    "GRANITE_KEYS",
    "GROUP_KEYS",
    "LATENT_KEYS",
    "MOE_KEYS",
    "NAMES",
    "QWEN_MOE_KEYS",
    "GgufArchitecture",
]

#: The tensor names of GGUF files. `GgufCheckpoint` lists a tensor of all experts by expert.
NAMES: Final = TensorNames(
    prefix="",
    embedding="token_embd",
    positions="position_embd",
    layers="blk",
    attention_norm="attn_norm",
    attention_out_norm="post_attention_norm",
    mlp_norm="ffn_norm",
    mlp_out_norm="post_ffw_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    out="attn_output",
    query_down="attn_q_a",
    query_norm="attn_q_a_norm",
    query_up="attn_q_b",
    kv_down="attn_kv_a_mqa",
    kv_norm="attn_kv_a_norm",
    kv_up=("attn_k_b", "attn_v_b"),
    index_query="indexer.attn_q_b",
    index_key="indexer.attn_k",
    index_norm="indexer.k_norm",
    index_weights="indexer.proj",
    sinks="attn_sinks.weight",
    up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    router="ffn_gate_inp",
    correction="exp_probs_b.bias",
    shared_up=("ffn_gate_shexp", "ffn_up_shexp"),
    shared_down="ffn_down_shexp",
    shared_gate="ffn_gate_inp_shexp",
    expert_up=("ffn_gate_exps.{}", "ffn_up_exps.{}"),
    expert_down="ffn_down_exps.{}",
    router_norm="ffn_gate_inp.scale",
    expert_scale="ffn_down_exps.scale",
    expert_norm="pre_ffw_norm_2",
    expert_out_norm="post_ffw_norm_2",
    expert_dense_norm="post_ffw_norm_1",
    norm="output_norm",
    head="output",
    delta_in=("attn_qkv", "attn_gate"),
    delta_gates=("ssm_ba",),
    delta_conv=("ssm_conv1d",),
    delta_rate="ssm_a",
    delta_bias="ssm_dt.bias",
    delta_norm="ssm_norm",
    delta_out="ssm_out",
    mamba_in="ssm_in",
    mamba_conv="ssm_conv1d",
    mamba_rate="ssm_a",
    mamba_bias="ssm_dt.bias",
    mamba_skip="ssm_d",
    mamba_norm="ssm_norm",
    mamba_out="ssm_out",
    conv_in="shortconv.in_proj",
    conv="shortconv.conv",
    conv_out="shortconv.out_proj",
    plain_rates=True,
    # Read with the config.
    ignored=(r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """One architecture of GGUF files."""

    #: The family's registered name.
    family: str
    names: TensorNames = NAMES
    #: Keys of `config.json` -> keys of the file, without the prefix of the architecture.
    keys: Mapping[str, str] = field(default_factory=dict)
    #: As `keys`, if the family uses one of Llama's keys for something else.
    own_keys: Mapping[str, str] = field(default_factory=dict)
    #: Values of `config.json` that the file lacks.
    values: Mapping[str, Any] = field(default_factory=dict)
    #: Values of `config.json` that are derived from several keys or from tensors. None stays a
    #: null: it means that the model lacks that part, not the family's default.
    derived: Callable[[Facts], Mapping[str, Any]] | None = None
    #: Whether files say which layers have a window.
    patterned: bool = False
    #: `values` and `keys` for the scaling of the rotation.
    scaling: Mapping[str, Any] = field(default_factory=dict)
    scaling_keys: Mapping[str, str] = field(default_factory=dict)
    #: Whether rows of a head that are rotated together are adjacent.
    interleaved: bool = False
    #: Fields of the `ModelConfig` to replace, since the converter changed the tensors.
    changes: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the converter multiplied weights by the model's factors: adapters, made for the
    #: weights before that, then do not fit.
    scaled: bool = False


MOE_KEYS: Final = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
QWEN_MOE_KEYS: Final = {
    **MOE_KEYS,
    "num_experts": "expert_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
#: Keys of experts in groups, scored by a sigmoid.
GROUP_KEYS: Final = {
    "n_routed_experts": "expert_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
}
LATENT_KEYS: Final = {
    **MOE_KEYS,
    "head_dim": "rope.dimension_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "n_routed_experts": "expert_count",
}
GRANITE_KEYS: Final = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
