"""The architectures of GGUF files that a family can read, and how their files differ.

A GGUF file has keys of its own, and the same names of tensors for every architecture. The family
that reads a model's `config.json` also reads these keys, once they are renamed to its own. The
changes that llama.cpp's converter makes to tensors are stated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from asyncinfer.layers import renamed
from asyncinfer.models.gguf.architecture import (
    GRANITE_KEYS,
    GROUP_KEYS,
    LATENT_KEYS,
    MOE_KEYS,
    NAMES,
    QWEN_MOE_KEYS,
    GgufArchitecture,
)
from asyncinfer.models.gguf.derived import (
    exaone_moe_values,
    glm_moe_values,
    granite_shared_values,
    indexed_values,
    latent_values,
    llama4_values,
    window_or_none,
)
from asyncinfer.models.gguf.gemma4_values import gemma4_values
from asyncinfer.models.gguf.hybrids import HYBRIDS

__all__ = ["ARCHITECTURES", "VARIANTS"]

#: xIELU's weights by `GgufCheckpoint`'s names.
_XIELU: Final = ("xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps")
#: The factor of rotated queries and keys in Phi-3.5-MoE, which no file contains.
_PHI_MSCALE: Final = 1.243163121016122
#: The converter has added 1 to the norms' weights.
_GEMMA_CHANGES: Final = {"norm": "rms"}
#: How fast queries grow with their position in Mistral's models, and the default.
_TEMPERED: Final = {"llama_4_scaling_beta": "attention.temperature_scale"}
_MISTRAL4_BETA: Final = 0.1

_GEMMA4_NAMES: Final = replace(
    NAMES,
    per_layer_embedding="per_layer_token_embd",
    per_layer_projection="per_layer_model_proj",
    per_layer_norm="per_layer_proj_norm",
    per_layer_gate="inp_gate",
    per_layer_out="proj",
    per_layer_out_norm="post_norm",
    layer_scale="layer_output_scale.weight",
)
#: Keys of experts beside shared ones, after layers without any.
_SIGMOID_KEYS: Final = {
    **MOE_KEYS,
    **GROUP_KEYS,
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
}
#: The sigmoid's number in a file's `expert_gating_func`.
_SIGMOID: Final = 2
#: Architectures whose files use the name before the plus -> a key that only their files have, not
#: zero, or with this value.
VARIANTS: Final[Mapping[str, tuple[str, int | None]]] = MappingProxyType(
    {
        "deepseek2+sigmoid": ("expert_gating_func", _SIGMOID),
        "deepseek2+tempered": ("attention.temperature_scale", None),
        "granitemoe+shared": ("expert_shared_feed_forward_length", None),
        "llama+experts": ("expert_count", None),
        "llama+window": ("attention.sliding_window", None),
        "mistral3+tempered": ("attention.temperature_scale", None),
        "olmo2+window": ("attention.sliding_window", None),
    }
)
ARCHITECTURES: Final[Mapping[str, GgufArchitecture]] = MappingProxyType(
    {
        "afmoe": GgufArchitecture(
            family="AfmoeForCausalLM",
            names=replace(NAMES, qkv=("attn_gate", *NAMES.qkv)),
            keys=_SIGMOID_KEYS,
            # llama.cpp scales embeddings in all of them.
            values={"mup_enabled": True},
        ),
        "apertus": GgufArchitecture(
            family="ApertusForCausalLM",
            # The weights are lists in the metadata.
            changes={"activation": renamed("xielu", _XIELU)},
        ),
        "arcee": GgufArchitecture(family="ArceeForCausalLM", interleaved=True),
        "cohere2": GgufArchitecture(
            family="Cohere2ForCausalLM", keys={"logit_scale": "logit_scale"}
        ),
        "deepseek2": GgufArchitecture(
            family="DeepseekV2ForCausalLM", keys=LATENT_KEYS, derived=latent_values
        ),
        # Files call these "deepseek2", too; their experts are scored by a sigmoid.
        "deepseek2+sigmoid": GgufArchitecture(
            family="DeepseekV3ForCausalLM", keys=LATENT_KEYS, derived=latent_values
        ),
        # Files call these "deepseek2", too; their queries grow with their position.
        "deepseek2+tempered": GgufArchitecture(
            family="Mistral4ForCausalLM",
            keys=LATENT_KEYS,
            values={"rope_parameters": None},
            derived=latent_values,
            scaling_keys=_TEMPERED,
        ),
        "dots1": GgufArchitecture(
            family="Dots1ForCausalLM",
            keys=_SIGMOID_KEYS,
            values={"sliding_window": None},
        ),
        "ernie4_5": GgufArchitecture(family="Ernie4_5ForCausalLM"),
        "ernie4_5-moe": GgufArchitecture(
            family="Ernie4_5_MoeForCausalLM",
            keys={
                **MOE_KEYS,
                "moe_num_experts": "expert_count",
                "moe_num_shared_experts": "expert_shared_count",
                "moe_layer_start_index": "leading_dense_block_count",
                "moe_layer_interval": "interleave_moe_layer_step",
            },
        ),
        "exaone4": GgufArchitecture(
            family="Exaone4ForCausalLM", patterned=True, derived=window_or_none
        ),
        "exaone-moe": GgufArchitecture(
            family="ExaoneMoEForCausalLM",
            keys={
                **MOE_KEYS,
                **GROUP_KEYS,
                "n_shared_experts": "expert_shared_count",
            },
            patterned=True,
            derived=exaone_moe_values,
        ),
        "gemma": GgufArchitecture(family="GemmaForCausalLM", changes=_GEMMA_CHANGES),
        "gemma2": GgufArchitecture(
            family="Gemma2ForCausalLM",
            keys={
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            changes=_GEMMA_CHANGES,
        ),
        "gemma3": GgufArchitecture(family="Gemma3ForCausalLM", changes=_GEMMA_CHANGES),
        "gemma4": GgufArchitecture(
            family="Gemma4ForCausalLM",
            names=_GEMMA4_NAMES,
            keys={"final_logit_softcapping": "final_logit_softcapping"},
            derived=gemma4_values,
        ),
        "glm-dsa": GgufArchitecture(
            family="GlmMoeDsaForCausalLM",
            keys={
                **LATENT_KEYS,
                "index_n_heads": "attention.indexer.head_count",
                "index_head_dim": "attention.indexer.key_length",
                "index_topk": "attention.indexer.top_k",
            },
            derived=indexed_values,
        ),
        "glm4": GgufArchitecture(family="Glm4ForCausalLM"),
        "glm4moe": GgufArchitecture(
            family="Glm4MoeForCausalLM",
            names=replace(NAMES, mlp_norm="post_attention_norm"),
            keys={**MOE_KEYS, **GROUP_KEYS},
            derived=glm_moe_values,
        ),
        "gpt-oss": GgufArchitecture(
            family="GptOssForCausalLM",
            names=replace(NAMES, mlp_norm="post_attention_norm"),
            keys={**MOE_KEYS, "num_local_experts": "expert_count"},
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
            keys=GRANITE_KEYS,
        ),
        "granitemoe": GgufArchitecture(
            family="GraniteMoeForCausalLM",
            interleaved=True,
            keys={**GRANITE_KEYS, **MOE_KEYS, "num_local_experts": "expert_count"},
        ),
        # Files call these "granitemoe", too; they have a shared expert, like Granite 4.
        "granitemoe+shared": GgufArchitecture(
            family="GraniteMoeHybridForCausalLM",
            interleaved=True,
            keys={**GRANITE_KEYS, **MOE_KEYS},
            derived=granite_shared_values,
        ),
        # The converter has stretched the base of the rotation.
        "hunyuan-dense": GgufArchitecture(family="HunYuanDenseV1ForCausalLM"),
        "hunyuan-moe": GgufArchitecture(
            family="HunYuanMoEV1ForCausalLM", keys={**MOE_KEYS, "num_experts": "expert_count"}
        ),
        "llama": GgufArchitecture(family="LlamaForCausalLM", interleaved=True),
        # Files call these "llama" too; they have experts, or a window.
        "llama+experts": GgufArchitecture(
            family="MixtralForCausalLM",
            interleaved=True,
            keys={**MOE_KEYS, "num_local_experts": "expert_count"},
            values={"sliding_window": None},
        ),
        "llama+window": GgufArchitecture(family="MistralForCausalLM", interleaved=True),
        "llama4": GgufArchitecture(
            family="Llama4ForCausalLM",
            keys={
                **MOE_KEYS,
                "num_local_experts": "expert_count",
                "interleave_moe_layer_step": "interleave_moe_layer_step",
            },
            own_keys={"intermediate_size": "expert_feed_forward_length"},
            derived=llama4_values,
        ),
        "minimax-m2": GgufArchitecture(
            family="MiniMaxM2ForCausalLM",
            keys={**MOE_KEYS, "num_local_experts": "expert_count"},
        ),
        "mistral3": GgufArchitecture(
            family="MistralForCausalLM", interleaved=True, values={"sliding_window": None}
        ),
        # Files call these "mistral3", too; their queries grow with their position.
        "mistral3+tempered": GgufArchitecture(
            family="Ministral3ForCausalLM",
            interleaved=True,
            values={"sliding_window": None},
            scaling_keys=_TEMPERED,
        ),
        "mistral4": GgufArchitecture(
            family="Mistral4ForCausalLM",
            keys=LATENT_KEYS,
            values={"rope_parameters": None},
            derived=latent_values,
            scaling={"llama_4_scaling_beta": _MISTRAL4_BETA},
            scaling_keys=_TEMPERED,
        ),
        # The converter has added 1 to the norms' weights.
        "nemotron": GgufArchitecture(family="NemotronForCausalLM", changes={"norm": "layer"}),
        "olmo2": GgufArchitecture(family="Olmo2ForCausalLM"),
        # Files call these "olmo2" too; they have a window.
        "olmo2+window": GgufArchitecture(family="Olmo3ForCausalLM", patterned=True),
        "olmoe": GgufArchitecture(
            family="OlmoeForCausalLM",
            keys={**MOE_KEYS, "num_experts": "expert_count"},
            values={"norm_topk_prob": False},
        ),
        "phi2": GgufArchitecture(family="PhiForCausalLM"),
        "phi3": GgufArchitecture(family="Phi3ForCausalLM"),
        "phimoe": GgufArchitecture(
            family="PhiMoEForCausalLM",
            keys={**MOE_KEYS, "num_local_experts": "expert_count"},
            values={"sliding_window": None},
            scaling={"short_mscale": _PHI_MSCALE, "long_mscale": _PHI_MSCALE},
        ),
        "qwen2": GgufArchitecture(family="Qwen2ForCausalLM"),
        "qwen2moe": GgufArchitecture(
            family="Qwen2MoeForCausalLM",
            keys=QWEN_MOE_KEYS,
            values={"norm_topk_prob": False},
        ),
        "qwen3": GgufArchitecture(family="Qwen3ForCausalLM"),
        "qwen3moe": GgufArchitecture(
            family="Qwen3MoeForCausalLM",
            keys={**MOE_KEYS, "num_experts": "expert_count"},
            values={"norm_topk_prob": True},
        ),
        "seed_oss": GgufArchitecture(
            family="SeedOssForCausalLM", names=replace(NAMES, mlp_norm="post_attention_norm")
        ),
        "smollm3": GgufArchitecture(family="SmolLM3ForCausalLM", interleaved=True),
        "starcoder2": GgufArchitecture(family="Starcoder2ForCausalLM"),
        **HYBRIDS,
    }
)
