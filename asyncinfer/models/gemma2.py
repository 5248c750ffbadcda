"""Gemma 2 (Gemma team, 2024): sandwich norms, soft caps, every other layer windowed."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import sliding_layers, windowed

__all__ = ["Gemma2"]


class Gemma2(Family):
    """Gemma 2: sandwich norms, soft caps, local and global layers in turns."""

    model_type = "gemma2"
    keys: ClassVar = {"hidden_act": "hidden_activation"}
    defaults: ClassVar = {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    #: Whether some checkpoints attend to later tokens, too.
    may_see_ahead: ClassVar[bool] = False

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if config.boolean("use_bidirectional_attention", False) and not self.may_see_ahead:
            raise config.refuse("use_bidirectional_attention", "is not supported")
        return replace(
            llama,
            block="sandwich",
            norm="rms-plus-one",
            layers=windowed(config, llama, self.sliding(config, llama)),
            attention_scale=config.number("query_pre_attn_scalar", 1e-3, 1e6) ** -0.5,
            attention_softcap=_cap(config, "attn_logit_softcapping"),
            embedding_scale=llama.hidden_size**0.5,
            logit_softcap=_cap(config, "final_logit_softcapping"),
            names=TensorNames(mlp_norm="pre_feedforward_layernorm"),
        )

    def sliding(self, config: JsonReader, llama: ModelConfig) -> tuple[bool, ...]:
        """Which layers have a window."""
        return sliding_layers(config, llama, lambda layer: layer % 2 == 0)


def _cap(config: JsonReader, key: str) -> float | None:
    return config.number(key, 1e-3, 1e6) if config.has(key) else None
