"""GPT-NeoX (Black et al., 2022) and Pythia: attention and feed-forward in parallel."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["GPTNeoX"]


class GPTNeoX(Family):
    """GPT-NeoX and Pythia: parallel residual, layer norms, biases, queries beside their keys."""

    model_type = "gpt_neox"
    keys: ClassVar = {
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
    }
    defaults: ClassVar = {
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "attention_bias": True,
    }
    partial_rotary = True

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        parallel = config.boolean("use_parallel_residual", True)
        return replace(
            llama,
            block="parallel" if parallel else "pre",
            norm="layer",
            gated_mlp=False,
            mlp_bias=True,
            num_kv_heads=llama.num_heads,
            names=TensorNames(
                prefix="gpt_neox.",
                embedding="embed_in",
                qkv=("attention.query_key_value",),
                qkv_by_head=True,
                out="attention.dense",
                up=("mlp.dense_h_to_4h",),
                down="mlp.dense_4h_to_h",
                norm="final_layer_norm",
                head="embed_out",
                ignored=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
            ),
        )
