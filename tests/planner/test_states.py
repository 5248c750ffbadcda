"""The plan of a hybrid: its parameters, the KV of the layers that have any, and its states."""

from __future__ import annotations

from typing import Any

import pytest
from planner.configs import CONFIGS

from asyncinfer import InvalidRequest
from asyncinfer.models import ModelConfig, parse_config
from asyncinfer.planner import FormatPlan, find_gpu, plan_config

#: LFM2-1.2B's.
CONFIG = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "block_ff_dim": 12288,
    "intermediate_size": 12288,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_embedding": True,
    "dtype": "bfloat16",
}
#: Qwen3-Next-80B-A3B's.
EXPERTS = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262_144,
    "rope_theta": 1e7,
    "dtype": "bfloat16",
}


def test_a_hybrid_is_planned() -> None:
    config = parse_config(CONFIG, file="config.json")
    plan = plan_config(config, gpu=find_gpu("h100"), context=8192)
    # What its page says: 1.17 billion, six layers with attention.
    assert plan.parameters == 1_170_340_608
    first = plan.formats[0]
    per_token = 6 * 2 * 8 * 64 * 2
    state = 10 * 2 * 2048 * 2
    assert first.kv_bytes_per_token == first.kv_bytes_per_further_token == per_token
    assert first.kv_bytes_per_sequence == 8192 * per_token + 3 * state
    assert first.sequences > 300


def test_states_larger_than_blocks_are_planned() -> None:
    config = parse_config(EXPERTS, file="config.json")
    plan = plan_config(config, gpu=find_gpu("h200"), context=8192)
    # What transformers counts.
    assert plan.parameters == 79_674_391_296
    per_token = 12 * 2 * 2 * 256 * 2
    state = 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert plan.formats[0].kv_bytes_per_token == per_token
    assert plan.formats[0].kv_bytes_per_sequence == 8192 * per_token + 3 * state


def test_states_that_are_kept_more_rarely() -> None:
    config, h200 = parse_config(EXPERTS, file="config.json"), find_gpu("h200")
    state = 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)

    def rows(config: ModelConfig, interval: int) -> tuple[FormatPlan, ...]:
        return plan_config(config, gpu=h200, context=8192, state_interval=interval).formats

    every, fourth = (rows(config, interval)[0].state_bytes_kept for interval in (1, 4))
    assert every == 512 * state == 4 * fourth
    # Fewer pages of states leave more memory to blocks.
    small = parse_config(CONFIG, file="config.json")
    for more, less in zip(rows(small, 4), rows(small, 1), strict=True):
        assert more.sequences > 1.2 * less.sequences
    with pytest.raises(InvalidRequest, match="state_interval=0: must be between 1"):
        plan_config(config, gpu=h200, state_interval=0)
    llama = parse_config(CONFIGS["Llama-3.1-8B"])
    assert plan_config(llama, gpu=h200).formats[0].state_bytes_kept == 0
    with pytest.raises(InvalidRequest, match="state_interval=2: no layer of LlamaForCausalLM"):
        plan_config(llama, gpu=h200, state_interval=2)


_GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "max_position_embeddings": 131_072,
    "head_dim": 128,
    "time_step_limit": [0.0, float("inf")],
}
#: What best-known checkpoints say, and the parameters that transformers counts, with the routers'
#: corrections.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "granite-4.0-h-tiny": (
        6_939_037_248,
        {
            **_GRANITE,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
        },
    ),
    "granite-4.0-h-1b": (
        1_461_538_368,
        {
            **_GRANITE,
            "intermediate_size": 4096,
            "shared_intermediate_size": 4096,
            "num_local_experts": 0,
        },
    ),
    "Falcon-H1-0.5B": (
        521_411_104,
        {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "vocab_size": 32_784,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_norm_before_gate": False,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
            "max_position_embeddings": 16_384,
        },
    ),
    "NVIDIA-Nemotron-Nano-9B-v2": (
        8_888_227_328,
        {
            **_NEMOTRON,
            "hidden_size": 4480,
            "intermediate_size": 15_680,
            "num_attention_heads": 40,
            "mamba_head_dim": 80,
            "num_hidden_layers": 56,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        },
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        31_577_937_344 + 2944,
        {
            **_NEMOTRON,
            "hidden_size": 2688,
            "num_key_value_heads": 2,
            "mamba_num_heads": 64,
            "intermediate_size": 1856,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
        },
    ),
    "Qwen3.5-35B-A3B": (
        34_660_610_688,
        {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "max_position_embeddings": 262_144,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_sizes_of_published_hybrids(name: str) -> None:
    parameters, values = PUBLISHED[name]
    plan = plan_config(parse_config(values), gpu=find_gpu("h200"), context=8192)
    assert plan.parameters == parameters


def test_mamba_beside_attention_is_planned() -> None:
    plan = plan_config(
        parse_config(PUBLISHED["Falcon-H1-0.5B"][1]), gpu=find_gpu("h200"), context=8192
    )
    per_token = 36 * 2 * 2 * 64 * 2
    state = 36 * (3 * (1536 + 2 * 128) * 2 + 24 * 128 * 64 * 4)
    assert plan.formats[0].kv_bytes_per_token == per_token
    assert plan.formats[0].kv_bytes_per_sequence == 8192 * per_token + 3 * state


def test_layers_without_attention_take_no_kv() -> None:
    config = parse_config(PUBLISHED["NVIDIA-Nemotron-Nano-9B-v2"][1])
    plan = plan_config(config, gpu=find_gpu("h200"), context=8192)
    assert plan.formats[0].kv_bytes_per_token == 4 * 2 * 8 * 128 * 2
