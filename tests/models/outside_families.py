"""Families as packages outside could bring them: each uses what no shipped one does."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.models import Family, JsonReader, ModelConfig, TensorNames
from asyncinfer.models.glm4 import GLM4


def interleaved(llama: ModelConfig) -> ModelConfig:
    assert llama.rope is not None
    return replace(llama, rope=replace(llama.rope, interleaved=True))


class Cohere(Family):
    """Command R: attention and feed-forward in parallel after one norm, interleaved rotation."""

    model_type = "cohere"
    keys: ClassVar = {"rms_norm_eps": "layer_norm_eps"}
    defaults: ClassVar = {
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if config.boolean("use_qk_norm", False):
            raise config.refuse("use_qk_norm", "layer norms of queries and keys are not supported")
        return replace(
            interleaved(llama),
            block="parallel-shared",
            norm="layer",
            norm_bias=False,
            logit_scale=config.number("logit_scale", 1e-6, 1e6, 0.0625),
        )


class GLM(GLM4):
    """The GLM-4 of 2024, without the second norms of the shipped one."""

    model_type = "glm"

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        names = TensorNames(up=("mlp.gate_up_proj",))
        return replace(interleaved(llama), out_bias=False, names=names)


class OLMo(Family):
    """OLMo: layer norms without weights."""

    model_type = "olmo"

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if config.has("clip_qkv"):
            raise config.refuse("clip_qkv", "is not supported")
        return replace(llama, norm="layer", norm_weight=False, norm_eps=1e-5)


OUTSIDE = {
    "CohereForCausalLM": Cohere,
    "GlmForCausalLM": GLM,
    "OlmoForCausalLM": OLMo,
}
