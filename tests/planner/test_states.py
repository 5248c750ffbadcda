"""The plan of a hybrid: its parameters, the KV of the layers that have any, and its states."""

from __future__ import annotations

import pytest
from planner.best_known import HYBRIDS
from planner.configs import CONFIGS

from asyncinfer import InvalidRequest
from asyncinfer.models import ModelConfig, parse_config
from asyncinfer.planner import FormatPlan, find_gpu, plan_config


def test_a_hybrid_is_planned() -> None:
    config = parse_config(HYBRIDS["LFM2-1.2B"][1], file="config.json")
    plan = plan_config(config, gpu=find_gpu("h100"), context=8192)
    # What its page says: 1.17 billion, six layers with attention.
    assert plan.parameters == HYBRIDS["LFM2-1.2B"][0]
    first = plan.formats[0]
    per_token = 6 * 2 * 8 * 64 * 2
    state = 10 * 2 * 2048 * 2
    assert first.kv_bytes_per_token == first.kv_bytes_per_further_token == per_token
    assert first.kv_bytes_per_sequence == 8192 * per_token + 3 * state
    assert first.sequences > 300


def test_states_larger_than_blocks_are_planned() -> None:
    config = parse_config(HYBRIDS["Qwen3-Next-80B-A3B"][1], file="config.json")
    plan = plan_config(config, gpu=find_gpu("h200"), context=8192)
    # What transformers counts.
    assert plan.parameters == HYBRIDS["Qwen3-Next-80B-A3B"][0]
    per_token = 12 * 2 * 2 * 256 * 2
    state = 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert plan.formats[0].kv_bytes_per_token == per_token
    assert plan.formats[0].kv_bytes_per_sequence == 8192 * per_token + 3 * state


def test_states_that_are_kept_more_rarely() -> None:
    config, h200 = (
        parse_config(HYBRIDS["Qwen3-Next-80B-A3B"][1], file="config.json"),
        find_gpu("h200"),
    )
    state = 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)

    def rows(config: ModelConfig, interval: int) -> tuple[FormatPlan, ...]:
        return plan_config(config, gpu=h200, context=8192, state_interval=interval).formats

    every, fourth = (rows(config, interval)[0].state_bytes_kept for interval in (1, 4))
    assert every == 512 * state == 4 * fourth
    # Fewer pages of states leave more memory to blocks.
    small = parse_config(HYBRIDS["LFM2-1.2B"][1], file="config.json")
    for more, less in zip(rows(small, 4), rows(small, 1), strict=True):
        assert more.sequences > 1.2 * less.sequences
    with pytest.raises(InvalidRequest, match="state_interval=0: must be between 1"):
        plan_config(config, gpu=h200, state_interval=0)
    llama = parse_config(CONFIGS["Llama-3.1-8B"])
    assert plan_config(llama, gpu=h200).formats[0].state_bytes_kept == 0
    with pytest.raises(InvalidRequest, match="state_interval=2: no layer of LlamaForCausalLM"):
        plan_config(llama, gpu=h200, state_interval=2)


def test_mamba_beside_attention_is_planned() -> None:
    plan = plan_config(
        parse_config(HYBRIDS["Falcon-H1-0.5B"][1]), gpu=find_gpu("h200"), context=8192
    )
    per_token = 36 * 2 * 2 * 64 * 2
    state = 36 * (3 * (1536 + 2 * 128) * 2 + 24 * 128 * 64 * 4)
    assert plan.formats[0].kv_bytes_per_token == per_token
    assert plan.formats[0].kv_bytes_per_sequence == 8192 * per_token + 3 * state


def test_layers_without_attention_take_no_kv() -> None:
    config = parse_config(HYBRIDS["NVIDIA-Nemotron-Nano-9B-v2"][1])
    plan = plan_config(config, gpu=find_gpu("h200"), context=8192)
    assert plan.formats[0].kv_bytes_per_token == 4 * 2 * 8 * 128 * 2
