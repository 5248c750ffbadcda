"""DeepSeek-V3 (DeepSeek-AI, 2024): latent attention, and many small experts in groups beside a
shared one."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import dense_first, read_grouped_experts, with_further_layers
from asyncinfer.models.family import Family
from asyncinfer.models.parts import ExpertsConfig, IndexerConfig, LatentConfig, LayerConfig
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.rope_parameters import mscale_of

__all__ = ["DeepSeekV3"]

_MOST = 1 << 16


class DeepSeekV3(Family):
    """DeepSeek-V3 and R1: latent attention, grouped experts, a shared one."""

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
            indexer=self.indexer(config),
        )
        assert llama.rope is not None
        rope = replace(llama.rope, size=latent.rotated)
        scale = (latent.plain + latent.rotated) ** -0.5
        scaling = config.object("rope_scaling") or config.object("rope_parameters")
        if scaling is not None and rope.rope_type != "default":
            all_dim = scaling.number("mscale_all_dim", 0.0, 1e3, 0.0)
            scale *= mscale_of(rope.factor, all_dim) ** 2 if all_dim else 1.0
        return replace(
            llama,
            num_kv_heads=1,
            head_dim=latent.held,
            rope=rope,
            latent=latent,
            attention_scale=scale,
            experts=self.experts(config, llama),
            layers=self.layers(config, llama.num_layers, rope),
            names=with_further_layers(config, llama),
        )

    def indexer(self, config: JsonReader) -> IndexerConfig | None:
        """The indexer of sparse attention; None: attention is dense."""
        return None

    def layers(
        self, config: JsonReader, count: int, rope: RopeConfig | None
    ) -> tuple[LayerConfig, ...]:
        """The settings of `count` layers; empty if all layers are alike."""
        return dense_first(config, count, rope)

    def experts(self, config: JsonReader, llama: ModelConfig) -> ExpertsConfig | None:
        """The mixture of experts; None: there is none."""
        return read_grouped_experts(config, llama)
