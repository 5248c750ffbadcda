"""Gemma 4 (Gemma team, 2026), text: global layers have larger heads and rotate a part of them,
values have a norm, and there may be shared keys and values and per-layer embeddings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Final

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.gemma4_layers import gemma4_layers
from asyncinfer.models.names import TensorNames
from asyncinfer.models.parts import MOST_WIDTH, ExpertsConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.windows import FULL, SLIDING

__all__ = ["Gemma4"]

_ROPES: Final = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


class Gemma4(Family):
    """Gemma 4, text only: local layers, and global ones with larger heads."""

    model_type = "gemma4_text"
    keys: ClassVar = {"hidden_act": "hidden_activation"}
    defaults: ClassVar = {
        "vocab_size": 262_144,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "rope_parameters": _ROPES,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "tie_word_embeddings": True,
    }
    #: The model's own head size and rotation are those of local layers.
    full_rope = SLIDING

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if config.has("use_bidirectional_attention"):
            # "vision" concerns the tokens of images, which are not read.
            config.string("use_bidirectional_attention")
            if config.values["use_bidirectional_attention"] != "vision":
                raise config.refuse("use_bidirectional_attention", "must be null or 'vision'")
        size = config.integer("hidden_size_per_layer_input", 0, MOST_WIDTH)
        if size:
            vocab = llama.vocab_size
            if config.integer("vocab_size_per_layer_input", 1, 1 << 30) != vocab:
                raise config.refuse("vocab_size_per_layer_input", f"must be vocab_size={vocab}")
        cap = "final_logit_softcapping"
        layers = gemma4_layers(config, llama)
        # Checkpoints have keys and values of layers that use another layer's instead.
        theirs = "|".join(str(i) for i, layer in enumerate(layers) if layer.shares_kv is not None)
        unused = rf".*\.layers\.({theirs})\.self_attn\.[kv]_(proj|norm)\.\w+"
        names = TensorNames(
            mlp_norm="pre_feedforward_layernorm",
            router="router.proj",
            expert_up=("experts.gate_up_proj",),
            expert_down="experts.down_proj",
            expert_outputs_first=True,
        )
        return replace(
            llama,
            block="sandwich",
            qk_norm="head",
            value_norm=True,
            layers=layers,
            experts=self.experts(config, llama),
            attention_scale=1.0,
            embedding_scale=llama.hidden_size**0.5,
            per_layer_inputs=size,
            layer_scale=True,
            logit_softcap=config.number(cap, 1e-3, 1e6) if config.has(cap) else None,
            names=replace(names, ignored=(*names.ignored, unused)),
        )

    def experts(self, config: JsonReader, llama: ModelConfig) -> ExpertsConfig | None:
        """The experts in parallel with each plain feed-forward layer; None: none."""
        if not config.boolean("enable_moe_block", False):
            return None
        size = config.integer("moe_intermediate_size", 1, MOST_WIDTH)
        config = config.renamed(num_experts_per_tok="top_k_experts")
        experts = read_experts(config, llama, "num_experts", size)
        return replace(experts, beside=True, router_norm=True, expert_scale=True)
