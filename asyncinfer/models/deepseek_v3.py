"""DeepSeek-V3 (DeepSeek-AI, 2024): latent attention, and many small experts in groups beside a
shared one."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_experts
from asyncinfer.models.family import Family
from asyncinfer.models.parts import ExpertsConfig, LatentConfig, LayerConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.rope_parameters import mscale_of

__all__ = ["DeepSeekV3"]

_MOST = 1 << 16


class DeepSeekV3(Family):
    """DeepSeek-V3 and R1, saved dequantised: latent attention, grouped experts, a shared one."""

    model_type = "deepseek_v3"
    keys: ClassVar = {"head_dim": "qk_rope_head_dim"}
    defaults: ClassVar = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    }

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        if llama.num_kv_heads != llama.num_heads:
            raise config.refuse("num_key_value_heads", f"must be {llama.num_heads}, as the heads")
        ranked = config.has("q_lora_rank")
        latent = LatentConfig(
            query_rank=config.integer("q_lora_rank", 1, _MOST) if ranked else None,
            kv_rank=config.integer("kv_lora_rank", 2, _MOST),
            plain=config.integer("qk_nope_head_dim", 1, _MOST),
            rotated=llama.head_dim,
            value=config.integer("v_head_dim", 1, _MOST),
            interleaved=config.boolean("rope_interleave", True),
        )
        assert llama.rope is not None
        rope = replace(llama.rope, size=latent.rotated)
        scale = (latent.plain + latent.rotated) ** -0.5
        scaling = config.object("rope_scaling") or config.object("rope_parameters")
        if scaling is not None and rope.rope_type != "default":
            all_dim = scaling.number("mscale_all_dim", 0.0, 1e3, 0.0)
            scale *= mscale_of(rope.factor, all_dim) ** 2 if all_dim else 1.0
        dense = config.integer("first_k_dense_replace", 0, _MOST)
        # The layers that predict further tokens are not used.
        extra = config.integer("num_nextn_predict_layers", 0, 16, 1)
        further = range(llama.num_layers, llama.num_layers + extra)
        ignored = tuple(rf"model\.layers\.{layer}\..*" for layer in further)
        return replace(
            llama,
            num_kv_heads=1,
            head_dim=latent.kv_rank + latent.rotated,
            rope=rope,
            latent=latent,
            attention_scale=scale,
            experts=self.experts(config, llama),
            layers=self._layers(llama.num_layers, dense, rope),
            names=replace(llama.names, ignored=(*llama.names.ignored, *ignored)),
        )

    def _layers(self, count: int, dense: int, rope: RopeConfig) -> tuple[LayerConfig, ...]:
        """The first `dense` have no experts."""
        if dense == 0:
            return ()
        return tuple(LayerConfig(rope=rope, experts=layer >= dense) for layer in range(count))

    def experts(self, config: JsonReader, llama: ModelConfig) -> ExpertsConfig:
        """The mixture of experts."""
        size = config.integer("moe_intermediate_size", 1, _MOST)
        experts = read_experts(config, llama, "n_routed_experts", size)
        groups = config.integer("n_group", 1, experts.count)
        if experts.count % groups or experts.count // groups < 2:
            raise config.refuse("n_group", f"must share out {experts.count} experts, two or more")
        active_groups = config.integer("topk_group", 1, groups)
        if experts.active > active_groups * (experts.count // groups):
            raise config.refuse("topk_group", f"has no {experts.active} experts for a token")
        return replace(
            experts,
            normalise=config.boolean("norm_topk_prob"),
            scoring="sigmoid",
            groups=groups,
            active_groups=active_groups,
            correction=True,
            scale=config.number("routed_scaling_factor", 1e-6, 1e6),
            shared_size=size * config.integer("n_shared_experts", 0, 64),
        )
