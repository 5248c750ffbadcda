"""`engine.stats()` of models with windows: blocks and window pages, from opening to the drain."""

from __future__ import annotations

from typing import Any

import pytest

from asyncinfer.models import LayerConfig, ModelConfig
from asyncinfer.testing import InlineEngine, RandomModel

BLOCK, CHUNK, WINDOW = 4, 8, 12


def model(*windows: int | None) -> RandomModel:
    return RandomModel(
        ModelConfig(
            architecture="MistralForCausalLM",
            vocab_size=300,
            hidden_size=16,
            intermediate_size=16,
            num_layers=len(windows),
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            max_context=256,
            layers=tuple(LayerConfig(rope=None, window=window) for window in windows),
        )
    )


def engine(*windows: int | None, **options: Any) -> InlineEngine:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "block_size": BLOCK,
        "max_step_tokens": CHUNK,
        "max_running": 2,
        "kv_bytes": 1 << 20,
    }
    return InlineEngine(model(*windows), **{**defaults, **options})


@pytest.mark.parametrize("windows", [(None, WINDOW, WINDOW), (WINDOW, WINDOW)])
def test_blocks_and_pages_from_opening_to_the_drain(windows: tuple[int | None, ...]) -> None:
    inline = engine(*windows)
    stats = inline.stats()
    assert stats.blocks_free == stats.blocks_total == 2 * 256 // BLOCK
    # Three blocks that a window spans, one where it begins, one to write; two chunks' in flight.
    assert stats.window_pages_free == stats.window_pages_total > 0
    prompt = list(range(3, 103))
    stream = inline.submit(prompt, max_tokens=60, temperature=0.0, ignore_eos=True)
    most = 0
    while inline.core.busy or not inline.core.inbox.empty():
        inline.pump()
        stats = inline.stats()
        used = stats.window_pages_total - stats.window_pages_free - stats.window_pages_cached
        most = max(most, used)
        if stats.generated_tokens == 30:
            held = stats.blocks_total - stats.blocks_free - stats.blocks_cached
            assert held == -(-130 // BLOCK)
            assert used * BLOCK <= WINDOW + 2 * BLOCK
    assert WINDOW <= most * BLOCK <= WINDOW + CHUNK + BLOCK
    stream.read()
    assert len(stream.token_ids()) == 60

    stats = inline.stats()
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.blocks_cached == 159 // BLOCK
    assert stats.window_pages_free + stats.window_pages_cached == stats.window_pages_total
    assert 0 < stats.window_pages_cached <= stats.blocks_cached


@pytest.mark.parametrize("windows", [(None, None), (None, 250)])
def test_without_pages_of_their_own_there_are_none(windows: tuple[int | None, ...]) -> None:
    inline = engine(*windows)
    stream = inline.submit([3, 4, 5], max_tokens=4, ignore_eos=True)
    inline.run()
    stream.read()
    assert len(stream.token_ids()) == 4
    stats = inline.stats()
    assert stats.window_pages_total == stats.window_pages_free == stats.window_pages_cached == 0
    assert stats.blocks_total == stats.blocks_free + stats.blocks_cached
