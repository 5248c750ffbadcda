"""Phi-1 to Phi-2 (Li et al., 2023): attention and feed-forward in parallel, after one norm."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.reader import JsonReader

__all__ = ["Phi"]


class Phi(Family):
    """Phi-1, Phi-1.5 and Phi-2: parallel residual, layer norms, biases everywhere."""

    model_type = "phi"
    keys: ClassVar = {"rms_norm_eps": "layer_norm_eps"}
    defaults: ClassVar = {
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
    }
    partial_rotary = True

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if config.boolean("qk_layernorm", False):
            raise config.refuse("qk_layernorm", "layer norms of queries and keys are not supported")
        return replace(
            llama,
            block="parallel-shared",
            norm="layer",
            gated_mlp=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            head_bias=True,
            names=TensorNames(
                out="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2", norm="final_layernorm"
            ),
        )
