"""What the `config.json` of well-known models says, as far as it decides their size."""

from __future__ import annotations

from typing import Any, Final


def _llama(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        **_llama(hidden, inner, layers, heads, 8, 151_936),
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    }


CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "Llama-2-7B": {
        **_llama(4096, 11_008, 32, 32, 32, 32_000),
        "max_position_embeddings": 4096,
        "dtype": "float16",
    },
    "Llama-3.1-8B": _llama(4096, 14_336, 32, 32, 8, 128_256),
    "Llama-3.1-70B": {**_llama(8192, 28_672, 80, 64, 8, 128_256), "dtype": "float16"},
    "Llama-3.2-1B": {
        **_llama(2048, 8192, 16, 32, 8, 128_256),
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32),
    "Mixtral-8x7B": {
        **_llama(4096, 14_336, 32, 32, 8, 32_000),
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32_768,
    },
    "Mistral-7B-v0.1": {
        **_llama(4096, 14_336, 32, 32, 8, 32_000),
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 4096,
        "max_position_embeddings": 32_768,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102_400,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50_257,
    },
}
#: As their makers count them: numbers in the published weights.
PARAMETERS: Final = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Mixtral-8x7B": 46_702_792_704,
    "Mistral-7B-v0.1": 7_241_732_096,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "gpt2": 124_439_808,
}
