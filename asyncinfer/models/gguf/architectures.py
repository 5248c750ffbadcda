"""The architectures of GGUF files that a family can read, and how their files differ.

A GGUF file has keys of its own, and the same names of tensors for every architecture. The family
that reads a model's `config.json` also reads these keys, once they are renamed to its own. The
changes that llama.cpp's converter makes to tensors are stated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from asyncinfer.models.gguf.derived import latent_values, window_or_none
from asyncinfer.models.names import TensorNames

__all__ = ["ARCHITECTURES", "GgufArchitecture"]

#: Names of the tensors of GGUF files. `GgufCheckpoint` gives a tensor of all experts by expert.
_NAMES: Final = TensorNames(
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
    norm="output_norm",
    head="output",
    # Read with the config.
    ignored=(r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """One architecture of GGUF files."""

    #: The name under which the family is registered.
    family: str
    names: TensorNames = _NAMES
    #: Keys of `config.json` -> keys of the file, without the architecture's name before them.
    keys: Mapping[str, str] = field(default_factory=dict)
    #: Values of `config.json` that the file lacks.
    values: Mapping[str, Any] = field(default_factory=dict)
    #: Values of `config.json` that follow from several keys, by a function of a key. A null stays
    #: one: it means that the model has no such part, not the family's default.
    derived: Callable[[Callable[[str], Any]], Mapping[str, Any]] | None = None
    #: Whether files say which layers have a window.
    patterned: bool = False
    #: `values` for the scaling of the rotation.
    scaling: Mapping[str, Any] = field(default_factory=dict)
    #: Whether rows of a head that are rotated together are adjacent.
    interleaved: bool = False
    #: Fields of the `ModelConfig` to replace, since the converter changed the tensors.
    changes: Mapping[str, Any] = field(default_factory=dict)


#: The converter has added 1 to the norms' weights.
_GEMMA_CHANGES: Final = {"norm": "rms"}
_MOE_KEYS: Final = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_GRANITE_KEYS: Final = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_DEEPSEEK_KEYS: Final = {
    **_MOE_KEYS,
    "head_dim": "rope.dimension_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "n_routed_experts": "expert_count",
}

ARCHITECTURES: Final[Mapping[str, GgufArchitecture]] = MappingProxyType(
    {
        "arcee": GgufArchitecture(family="ArceeForCausalLM", interleaved=True),
        "cohere2": GgufArchitecture(
            family="Cohere2ForCausalLM", keys={"logit_scale": "logit_scale"}
        ),
        "deepseek2": GgufArchitecture(
            family="DeepseekV2ForCausalLM", keys=_DEEPSEEK_KEYS, derived=latent_values
        ),
        # Files call these "deepseek2" too; their experts are scored by a sigmoid.
        "deepseek2+sigmoid": GgufArchitecture(
            family="DeepseekV3ForCausalLM", keys=_DEEPSEEK_KEYS, derived=latent_values
        ),
        "ernie4_5": GgufArchitecture(family="Ernie4_5ForCausalLM"),
        "ernie4_5-moe": GgufArchitecture(
            family="Ernie4_5_MoeForCausalLM",
            keys={
                **_MOE_KEYS,
                "moe_num_experts": "expert_count",
                "moe_num_shared_experts": "expert_shared_count",
                "moe_layer_start_index": "leading_dense_block_count",
                "moe_layer_interval": "interleave_moe_layer_step",
            },
        ),
        "exaone4": GgufArchitecture(
            family="Exaone4ForCausalLM", patterned=True, derived=window_or_none
        ),
        "gemma2": GgufArchitecture(
            family="Gemma2ForCausalLM",
            keys={
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            changes=_GEMMA_CHANGES,
        ),
        "gemma3": GgufArchitecture(family="Gemma3ForCausalLM", changes=_GEMMA_CHANGES),
        "glm4": GgufArchitecture(family="Glm4ForCausalLM"),
        "gpt-oss": GgufArchitecture(
            family="GptOssForCausalLM",
            names=replace(_NAMES, mlp_norm="post_attention_norm"),
            keys={**_MOE_KEYS, "num_local_experts": "expert_count"},
            scaling={"truncate": False},
        ),
        "gpt2": GgufArchitecture(family="GPT2LMHeadModel"),
        "gptneox": GgufArchitecture(
            family="GPTNeoXForCausalLM",
            keys={"use_parallel_residual": "use_parallel_residual"},
        ),
        "granite": GgufArchitecture(
            family="GraniteForCausalLM",
            interleaved=True,
            keys=_GRANITE_KEYS,
        ),
        "granitemoe": GgufArchitecture(
            family="GraniteMoeForCausalLM",
            interleaved=True,
            keys={**_GRANITE_KEYS, **_MOE_KEYS, "num_local_experts": "expert_count"},
        ),
        # The converter has stretched the base of the rotation.
        "hunyuan-dense": GgufArchitecture(family="HunYuanDenseV1ForCausalLM"),
        "llama": GgufArchitecture(family="LlamaForCausalLM", interleaved=True),
        # Files call these "llama" too; they have experts, or a window.
        "llama+experts": GgufArchitecture(
            family="MixtralForCausalLM",
            interleaved=True,
            keys={**_MOE_KEYS, "num_local_experts": "expert_count"},
            values={"sliding_window": None},
        ),
        "llama+window": GgufArchitecture(family="MistralForCausalLM", interleaved=True),
        "minimax-m2": GgufArchitecture(
            family="MiniMaxM2ForCausalLM",
            keys={**_MOE_KEYS, "num_local_experts": "expert_count"},
        ),
        # The converter has added 1 to the norms' weights.
        "nemotron": GgufArchitecture(family="NemotronForCausalLM", changes={"norm": "layer"}),
        "olmo2": GgufArchitecture(family="Olmo2ForCausalLM"),
        # Files call these "olmo2" too; they have a window.
        "olmo2+window": GgufArchitecture(family="Olmo3ForCausalLM", patterned=True),
        "olmoe": GgufArchitecture(
            family="OlmoeForCausalLM",
            keys={**_MOE_KEYS, "num_experts": "expert_count"},
            values={"norm_topk_prob": False},
        ),
        "phi2": GgufArchitecture(family="PhiForCausalLM"),
        "phi3": GgufArchitecture(family="Phi3ForCausalLM"),
        "qwen2": GgufArchitecture(family="Qwen2ForCausalLM"),
        "qwen2moe": GgufArchitecture(
            family="Qwen2MoeForCausalLM",
            keys={
                **_MOE_KEYS,
                "num_experts": "expert_count",
                "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            },
            values={"norm_topk_prob": False},
        ),
        "qwen3": GgufArchitecture(family="Qwen3ForCausalLM"),
        "qwen3moe": GgufArchitecture(
            family="Qwen3MoeForCausalLM",
            keys={**_MOE_KEYS, "num_experts": "expert_count"},
            values={"norm_topk_prob": True},
        ),
        "seed_oss": GgufArchitecture(
            family="SeedOssForCausalLM", names=replace(_NAMES, mlp_norm="post_attention_norm")
        ),
        "smollm3": GgufArchitecture(family="SmolLM3ForCausalLM", interleaved=True),
        "starcoder2": GgufArchitecture(family="Starcoder2ForCausalLM"),
    }
)
