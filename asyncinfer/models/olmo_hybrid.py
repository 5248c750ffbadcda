"""OLMo-hybrid (OLMo team, 2026): gated delta nets in most layers, with norms before, and OLMo 3's
attention in the others, with norms after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.delta_nets import delta_net, linear_layers
from asyncinfer.models.family import Family
from asyncinfer.models.names import TensorNames
from asyncinfer.models.parts import LayerConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["OLMoHybrid"]


class OLMoHybrid(Family):
    """OLMo-hybrid, such as Olmo-Hybrid-7B."""

    model_type = "olmo_hybrid"
    defaults: ClassVar = {
        "hidden_size": 3840,
        "num_attention_heads": 30,
        "max_position_embeddings": 65_536,
        "linear_conv_kernel_dim": 4,
    }

    def complete(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values with the sizes of the delta nets, which are derived where they are missing or
        null."""
        whole = dict(super().complete(values))
        for key in ("linear_num_key_heads", "linear_num_value_heads"):
            if whole.get(key) is None:
                whole[key] = whole["num_attention_heads"]
        heads, hidden = whole["linear_num_key_heads"], whole["hidden_size"]
        if (
            whole.get("linear_key_head_dim") is None
            and type(heads) is type(hidden) is int
            and heads
        ):
            whole["linear_key_head_dim"] = 3 * hidden // (4 * heads)
        size = whole.get("linear_key_head_dim")
        if whole.get("linear_value_head_dim") is None and type(size) is int:
            whole["linear_value_head_dim"] = 2 * size
        return whole

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        turns = config.boolean("linear_allow_neg_eigval", True)
        mixer = replace(delta_net(config), beta_scale=2.0 if turns else 1.0, norm_eps=1e-5)
        rope = None if _unrotated(config) else llama.rope
        # At least one layer attends, however few layers there are.
        every = min(4, llama.num_layers)
        return replace(
            llama,
            qk_norm="projection",
            mlp_bias=False,
            rope=rope,
            layers=tuple(
                LayerConfig(rope=None, mixer=mixer, block="pre")
                if is_linear
                else LayerConfig(rope=rope, block="post")
                for is_linear in linear_layers(config, llama.num_layers, every)
            ),
            names=TensorNames(
                attention_norm="attention_layer_norm",
                mlp_norm="feedforward_layer_norm",
                # Module names as transformers saves them.
                spellings=(
                    ("attention_out_norm", "feedforward_layer_norm"),
                    ("attention_norm", "input_layernorm"),
                    ("mlp_norm", "post_attention_layernorm"),
                ),
                delta_in=tuple(f"linear_attn.{part}_proj" for part in "qkvg"),
                delta_gates=("linear_attn.b_proj", "linear_attn.a_proj"),
                delta_conv=tuple(f"linear_attn.{part}_conv1d" for part in "qkv"),
                delta_norm="linear_attn.o_norm",
                delta_out="linear_attn.o_proj",
            ),
        )


def _unrotated(config: JsonReader) -> bool:
    """Whether the base of the rotation is null, so that queries and keys are not rotated."""
    holder = config.object("rope_parameters") or config
    return "rope_theta" in holder.values and not holder.has("rope_theta")
