"""Gemma 3 (Gemma team, 2025), text: Gemma 2 with norms of queries and keys, no soft caps, and a
rotation of their own for the windowed layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.gemma2 import Gemma2
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.rope_parameters import read_rope
from asyncinfer.models.windows import FULL, MOST_WINDOW, SLIDING, sliding_layers, windowed

__all__ = ["Gemma3"]


class Gemma3(Gemma2):
    """Gemma 3, text only: five local layers for each global one, with rotations of their own."""

    model_type = "gemma3_text"
    defaults: ClassVar = {
        **Gemma2.defaults,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }
    full_rope = FULL
    may_see_ahead = True

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if config.has("attn_logit_softcapping"):
            # transformers reads this key and ignores it; no checkpoint is known to have it.
            raise config.refuse("attn_logit_softcapping", "no Gemma 3 has any: must be null")
        bidirectional = config.boolean("use_bidirectional_attention", False)
        if bidirectional and config.has("sliding_window"):
            # The config's window counts the tokens on both sides together.
            window = config.integer("sliding_window", 1, MOST_WINDOW)
            config = config.replaced({"sliding_window": window // 2 + 1})
        # Scaling that stands beside the layers' parameters is meant for the global ones.
        local = config.renamed(rope_theta="rope_local_base_freq", rope_scaling="")
        rope = read_rope(local, llama.max_context, llama.head_dim, SLIDING)
        layers = windowed(config, llama, self.sliding(config, llama), rope)
        made = super().configure(config, llama)
        bidirectional = bidirectional or llama.bidirectional
        return replace(made, qk_norm="head", layers=layers, bidirectional=bidirectional)

    def sliding(self, config: JsonReader, llama: ModelConfig) -> tuple[bool, ...]:
        every = config.integer("sliding_window_pattern", 1, 1 << 10, 6)
        return sliding_layers(config, llama, lambda layer: (layer + 1) % every != 0)
