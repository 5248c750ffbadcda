"""Well-known shapes of models, by name: what their `config.json` says as far as speed goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = [
    "EXPERTS",
    "FULL_SHAPES",
    "LLAMA_125M",
    "LLAMA_TINY",
    "SHAPES",
    "TINY",
    "TINY_EXPERTS",
    "shape_json",
]

#: For smoke runs.
TINY: Final = "tiny"
TINY_EXPERTS: Final = "tiny-experts"
#: A mixture of experts, for its kernels.
EXPERTS: Final = "qwen3-30b-a3b"


def _llama(hidden: int, inner: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        **_llama(hidden, inner, layers, heads, 128),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


def _experts(shape: Mapping[str, Any], count: int, active: int, size: int) -> dict[str, Any]:
    return {
        **shape,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": count,
        "num_experts_per_tok": active,
        "moe_intermediate_size": size,
        "norm_topk_prob": True,
    }


_TINY: Final = {
    **_qwen3(64, 128, 2, 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": _llama(4096, 14_336, 32, 32, 128),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "llama-3.2-1b": {**_llama(2048, 8192, 16, 32, 64), "tie_word_embeddings": True},
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    EXPERTS: _experts({**_qwen3(2048, 6144, 48, 32), "num_key_value_heads": 4}, 128, 8, 768),
    TINY: _TINY,
    TINY_EXPERTS: _experts(_TINY, 8, 2, 48),
}
#: What CPUs are measured on, and its like for smoke runs.
LLAMA_125M: Final[Mapping[str, Any]] = {
    **_llama(768, 2048, 12, 12, 64),
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "dtype": "float32",
}
LLAMA_TINY: Final[Mapping[str, Any]] = {
    **LLAMA_125M,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
#: Those that whole steps are measured of.
FULL_SHAPES: Final = tuple(name for name in SHAPES if name not in (TINY, TINY_EXPERTS, EXPERTS))


def shape_json(name: str) -> dict[str, Any]:
    """The `config.json` of a shape."""
    return dict(SHAPES[name])
