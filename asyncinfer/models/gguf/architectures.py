"""The architectures of GGUF files that a family can read, and how their files differ.

A GGUF file has keys of its own, and the same names of tensors for every architecture. The family
that reads a model's `config.json` also reads these keys, once they are renamed to its own. The
changes that llama.cpp's converter makes to tensors are stated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

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
    sinks="attn_sinks.weight",
    up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    router="ffn_gate_inp",
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
    #: The same for the scaling of the rotation.
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

ARCHITECTURES: Final[Mapping[str, GgufArchitecture]] = MappingProxyType(
    {
        "gemma2": GgufArchitecture(
            family="Gemma2ForCausalLM",
            keys={
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            changes=_GEMMA_CHANGES,
        ),
        "gemma3": GgufArchitecture(family="Gemma3ForCausalLM", changes=_GEMMA_CHANGES),
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
            keys={
                "embedding_multiplier": "embedding_scale",
                "attention_multiplier": "attention.scale",
                "residual_multiplier": "residual_scale",
                "logits_scaling": "logit_scale",
            },
        ),
        "llama": GgufArchitecture(family="LlamaForCausalLM", interleaved=True),
        # Files call these "llama" too; they have experts, or a window.
        "llama+experts": GgufArchitecture(
            family="MixtralForCausalLM",
            interleaved=True,
            keys={**_MOE_KEYS, "num_local_experts": "expert_count"},
            values={"sliding_window": None},
        ),
        "llama+window": GgufArchitecture(family="MistralForCausalLM", interleaved=True),
        "olmo2": GgufArchitecture(family="Olmo2ForCausalLM"),
        "phi2": GgufArchitecture(family="PhiForCausalLM"),
        "phi3": GgufArchitecture(family="Phi3ForCausalLM"),
        "qwen2": GgufArchitecture(family="Qwen2ForCausalLM"),
        "qwen3": GgufArchitecture(family="Qwen3ForCausalLM"),
        "qwen3moe": GgufArchitecture(
            family="Qwen3MoeForCausalLM",
            keys={**_MOE_KEYS, "num_experts": "expert_count"},
            values={"norm_topk_prob": True},
        ),
        "smollm3": GgufArchitecture(family="SmolLM3ForCausalLM", interleaved=True),
        "starcoder2": GgufArchitecture(family="Starcoder2ForCausalLM"),
    }
)
