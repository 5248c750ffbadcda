"""The plan of a hybrid: its parameters, the KV of the layers that have any, and its states."""

from __future__ import annotations

from asyncinfer.models import parse_config
from asyncinfer.planner import find_gpu, plan_config

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
