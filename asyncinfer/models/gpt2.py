"""GPT-2 (Radford et al., 2019): learned positions, weights stored the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["GPT2"]


class GPT2(Family):
    """GPT-2: learned positions, layer norms, biases, transposed weights."""

    model_type = "gpt2"
    keys: ClassVar = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    }
    defaults: ClassVar = {
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }

    def complete(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        width = values.get("n_embd")
        if values.get("n_inner") is None and isinstance(width, int):
            values = {**values, "n_inner": 4 * width}
        return super().complete(values)

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            if config.boolean(key, False):
                raise config.refuse(key, "is not supported")
        return replace(
            llama,
            norm="layer",
            rope=None,
            learned_positions=llama.max_context,
            gated_mlp=False,
            num_kv_heads=llama.num_heads,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            attention_scale=None if config.boolean("scale_attn_weights", True) else 1.0,
            names=TensorNames(
                prefix="transformer.",
                embedding="wte",
                positions="wpe",
                layers="h",
                attention_norm="ln_1",
                mlp_norm="ln_2",
                qkv=("attn.c_attn",),
                out="attn.c_proj",
                up=("mlp.c_fc",),
                down="mlp.c_proj",
                norm="ln_f",
                transposed=True,
                ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
            ),
        )
