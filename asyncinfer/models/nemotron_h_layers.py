"""The layers of Nemotron-H: how its config and checkpoints name their parts."""

from __future__ import annotations

import math
from dataclasses import replace

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.experts import read_grouped_experts
from asyncinfer.models.names import TensorNames
from asyncinfer.models.parts import (
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_WIDTH,
    ExpertsConfig,
    MambaConfig,
)
from asyncinfer.models.reader import JsonReader

__all__ = ["nemotron_experts", "nemotron_mixer", "nemotron_names"]


def nemotron_mixer(config: JsonReader) -> MambaConfig:
    """The config of the Mamba-2 layers. Raises `ModelLoadError` for impossible values."""
    if config.string("mamba_hidden_act") != "silu":
        raise config.refuse("mamba_hidden_act", "must be silu")
    heads = config.integer("mamba_num_heads", 1, MOST_HEADS)
    groups = config.integer("n_groups", 1, heads)
    if heads % groups:
        raise config.refuse("n_groups", f"must divide mamba_num_heads={heads}")
    bias = config.boolean("use_bias")
    return MambaConfig(
        heads=heads,
        head_dim=config.integer("mamba_head_dim", 1, MOST_HEAD_DIM),
        state_dim=config.integer("ssm_state_size", 1, MOST_HEAD_DIM),
        groups=groups,
        width=config.integer("conv_kernel", 2, 1 << 10),
        conv_bias=config.boolean("use_conv_bias"),
        in_bias=bias,
        out_bias=bias,
        # As in transformers, which ignores `time_step_limit` here.
        steps=(config.number("time_step_min", 0.0, 1e6), math.inf),
    )


def nemotron_experts(config: JsonReader, llama: ModelConfig) -> ExpertsConfig:
    """The experts, one of which is shared by all tokens."""
    size = config.integer("moe_shared_expert_intermediate_size", 1, MOST_WIDTH)
    return replace(read_grouped_experts(config, llama), shared_size=size)


def nemotron_names() -> TensorNames:
    """The names of the tensors of all kinds of layers."""
    return TensorNames(
        prefix="backbone.",
        embedding="embeddings",
        attention_norm="norm",
        mlp_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        out="mixer.o_proj",
        mamba_in="mixer.in_proj",
        mamba_conv="mixer.conv1d",
        mamba_rate="mixer.A_log",
        mamba_bias="mixer.dt_bias",
        mamba_skip="mixer.D",
        mamba_norm="mixer.norm",
        mamba_out="mixer.out_proj",
        up=("mixer.up_proj",),
        down="mixer.down_proj",
        router="mixer.gate",
        correction="mixer.gate.e_score_correction_bias",
        expert_up=("mixer.experts.{}.up_proj",),
        expert_down="mixer.experts.{}.down_proj",
        shared_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
        norm="norm_f",
        ignored=(*TensorNames().ignored, r"mtp\..*"),
    )
