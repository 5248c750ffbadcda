"""Well-known shapes of models, by name: what their `config.json` says as far as speed goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asyncinfer.bench.shapes import llama_json

__all__ = ["EXPERTS", "FULL_SHAPES", "SHAPES", "TINY", "TINY_EXPERTS", "shape_json"]

#: For smoke runs.
TINY: Final = "tiny"
TINY_EXPERTS: Final = "tiny-experts"
#: A mixture of experts, for its kernels.
EXPERTS: Final = "qwen3-30b-a3b"


def _qwen3(hidden: int, inner: int, layers: int, heads: int, **changes: Any) -> dict[str, Any]:
    return {
        **llama_json(hidden, inner, layers, heads, 128),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        **changes,
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


_TINY: Final = _qwen3(
    64, 128, 2, 4, num_key_value_heads=2, head_dim=16, vocab_size=1024, max_position_embeddings=4096
)
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": llama_json(4096, 14_336, 32, 32, 128),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "llama-3.2-1b": llama_json(2048, 8192, 16, 32, 64, tie_word_embeddings=True),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    EXPERTS: _experts(_qwen3(2048, 6144, 48, 32, num_key_value_heads=4), 128, 8, 768),
    TINY: _TINY,
    TINY_EXPERTS: _experts(_TINY, 8, 2, 48),
}
#: Those that whole steps are measured of.
FULL_SHAPES: Final = tuple(name for name in SHAPES if name not in (TINY, TINY_EXPERTS, EXPERTS))


def shape_json(name: str) -> dict[str, Any]:
    """The `config.json` of a shape."""
    return dict(SHAPES[name])
