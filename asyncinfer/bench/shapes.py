"""Well-known shapes of models, by name: what their `config.json` says as far as speed goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["FULL_SHAPES", "SHAPES", "TINY", "shape_json"]

#: For smoke runs.
TINY: Final = "tiny"


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


SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": _llama(4096, 14_336, 32, 32, 128),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "llama-3.2-1b": {**_llama(2048, 8192, 16, 32, 64), "tie_word_embeddings": True},
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    TINY: {
        **_qwen3(64, 128, 2, 4),
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
    },
}
#: Those that mean something.
FULL_SHAPES: Final = tuple(name for name in SHAPES if name != TINY)


def shape_json(name: str) -> dict[str, Any]:
    """The `config.json` of a shape."""
    return dict(SHAPES[name])
