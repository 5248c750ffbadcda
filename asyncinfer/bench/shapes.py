"""Llamas of random weights that CPUs are measured on: their `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["LLAMA_125M", "LLAMA_TINY", "llama_json"]


def llama_json(
    hidden: int, inner: int, layers: int, heads: int, head_dim: int, **changes: Any
) -> dict[str, Any]:
    """The `config.json` of a Llama as far as speed goes: Llama 3's, with `changes`."""
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
        **changes,
    }


_SMALL: Final = {"max_position_embeddings": 2048, "rope_theta": 10_000.0, "dtype": "float32"}
LLAMA_125M: Final[Mapping[str, Any]] = llama_json(
    768, 2048, 12, 12, 64, num_key_value_heads=4, vocab_size=32_000, **_SMALL
)
#: Its like for smoke runs.
LLAMA_TINY: Final[Mapping[str, Any]] = llama_json(
    64, 128, 2, 4, 16, num_key_value_heads=2, vocab_size=512, **_SMALL
)
