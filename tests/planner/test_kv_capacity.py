"""How many sequences fit: what the planner says is what an engine does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.published import CONFIGS

from asyncinfer.attention import KVCache
from asyncinfer.cache import steady_pages
from asyncinfer.config import EngineConfig
from asyncinfer.models import ModelConfig, parse_config
from asyncinfer.planner import find_gpu, plan_config
from asyncinfer.planner.kv_capacity import KVCapacity, kv_capacity
from asyncinfer.runner import plan_memory
from asyncinfer.runner.memory import kv_layer_bytes, pages_in_flight
from asyncinfer.testing import InlineEngine, RandomModel

BLOCK, CHUNK, WINDOW = 4, 24, 16
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
}
#: Every other layer with a window; five of six; all; none.
HYBRIDS = {
    "gemma2": {**TINY, "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4},
    "gemma3": {**TINY, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6},
    "mistral": {**TINY, "architectures": ["MistralForCausalLM"], "num_hidden_layers": 2},
    "llama": {**TINY, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2},
}


def options(context: int, **more: Any) -> EngineConfig:
    return EngineConfig(
        device="cpu", block_size=BLOCK, max_step_tokens=CHUNK, max_context=context, **more
    )


def room_for(config: ModelConfig, context: int, budget: int) -> KVCapacity:
    layers = kv_layer_bytes(config, BLOCK, torch.float32)
    return kv_capacity(config, options(context), layers, lambda _: budget, overlap=1)


def together(config: ModelConfig, context: int, budget: int, count: int) -> bool:
    """Whether so many sequences of `context` tokens run to their end at once in a real engine."""
    engine = InlineEngine(
        RandomModel(config),
        config=options(context, kv_bytes=budget, max_running=count, prefix_cache=False),
    )
    kv = engine.core.runner.kv  # type: ignore[attr-defined]
    held = sum(group.storage.nbytes for group in kv)
    assert held <= budget
    streams = [
        engine.submit([3 + number] * 24, max_tokens=context - 24, ignore_eos=True, seed=1)
        for number in range(count)
    ]
    most = 0
    while engine.core.busy or not engine.core.inbox.empty():
        engine.pump()
        most = max(most, engine.stats().running)
    for stream in streams:
        stream.read()
        assert len(stream.token_ids()) == context - 24
    return most == count and not engine.stats().preemptions


@pytest.mark.parametrize("name", HYBRIDS)
def test_as_many_as_fit_run(name: str) -> None:
    config = parse_config(HYBRIDS[name])
    budget = 4 * 72 * 2 * 8 * 4 * config.num_layers
    room = room_for(config, 72, budget)
    # Four, if no layer has a window.
    assert (room.sequences == 4) == (name == "llama")
    assert 4 <= room.sequences < 12
    assert room.sequences * room.per_sequence + room.in_flight <= budget
    assert together(config, 72, budget, room.sequences)
    assert not together(config, 72, budget, 2 * room.sequences)


def test_what_a_sequence_holds() -> None:
    """The window as it lies in its blocks in layers that have one, the whole context in others."""
    layer = 2 * BLOCK * 8 * 4
    for name, far, near in (("gemma2", 2, 2), ("gemma3", 1, 5), ("mistral", 0, 2), ("llama", 2, 0)):
        room = room_for(parse_config(HYBRIDS[name]), 120, 1 << 20)
        assert len(room.layers) == far
        pages = steady_pages(WINDOW, BLOCK)
        assert WINDOW <= pages * BLOCK <= WINDOW + 2 * BLOCK
        assert room.per_sequence == (30 * far + pages * near) * layer
        assert room.in_flight == CHUNK // BLOCK * near * layer


def test_windows_that_save_nothing_are_held_whole() -> None:
    config = parse_config(HYBRIDS["gemma2"])
    room = room_for(config, 24, 1 << 20)
    assert (room.layers, room.in_flight) == ((0, 1, 2, 3), 0)
    assert room.per_sequence == 6 * KVCache.bytes_per_block(config, BLOCK, torch.float32)


def test_where_nothing_fits() -> None:
    room = room_for(parse_config(HYBRIDS["gemma2"]), 120, 2000)
    assert room.sequences == 0
    assert room.per_sequence > 2000


@pytest.mark.parametrize(
    ("name", "gpu", "context"),
    [
        ("gemma-2-9b", "a100", 8192),
        ("gemma-3-4b", "l4", 32_768),
        ("gemma-3-1b", "rtx-4090", 8192),
        ("Mistral-7B-v0.1", "l40s", 32_768),
        ("Phi-3-mini-4k", "rtx-3090", 4096),
        ("Llama-3.1-8B", "l40s", 8192),
    ],
)
def test_what_an_engine_sets_aside_on_a_gpu(
    name: str, gpu: str, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, gpu_facts = parse_config(CONFIGS[name]), find_gpu(gpu)
    found = plan_config(config, gpu=gpu_facts, context=context, dtype="bfloat16").formats[0]
    left = int(gpu_facts.memory) - found.weight_bytes
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (left, 1 << 40))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 0)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 0)

    def run(count: int) -> bool:
        engine = EngineConfig(max_context=context, max_running=count)
        spec = plan_memory(engine, config, torch.bfloat16, torch.device("cuda"), 1000)
        if spec.num_blocks < count * -(-context // 16):
            return False
        return all(
            group.num_pages
            >= count * steady_pages(window, 16) + pages_in_flight(engine, spec.overlap)
            for group in spec.groups
            if (window := group.window) is not None
        )

    assert found.sequences > 2
    # Less is left over than one more takes, the largest step's own memory aside.
    used = (found.sequences + 1) * found.kv_bytes_per_sequence + found.kv_bytes_in_flight
    assert used > EngineConfig().kv_fraction * (left - 4e9)
    assert run(found.sequences)
    assert not run(found.sequences + 1)


def test_figures_of_a_hybrid() -> None:
    """gemma-3-4b keeps all in 5 of 34 layers, and a window of 1,024 in the others."""
    found = plan_config(
        parse_config(CONFIGS["gemma-3-4b"]), gpu=find_gpu("h100"), context=32_768
    ).formats[0]
    layer = 2 * 4 * 256 * 2
    assert found.kv_bytes_per_token == 34 * layer
    assert found.kv_bytes_per_further_token == 5 * layer
    assert found.kv_bytes_per_sequence == (5 * 32_768 + 29 * (1024 + 32)) * layer
    # Four steps of 2,048 tokens.
    assert found.kv_bytes_in_flight == 29 * 4 * 2048 * layer
    assert found.kv_bytes_read == (5 * 32_769 + 29 * 1024) * layer
