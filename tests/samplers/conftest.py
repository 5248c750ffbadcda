"""A tiny random decoder behind a real engine, a way to open one, and the one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import torch

from asyncinfer import Engine, EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.models import Decoder, ModelConfig, tensor_table
from asyncinfer.runner import runner_of
from asyncinfer.text import Tokenizer

OpenTiny = Callable[..., AbstractAsyncContextManager[Engine]]


class TinyModel:
    """A `ModelSource`: random weights over bytes, whose answers are as good as random text."""

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        tokenizer = Tokenizer.byte_level(add_bos=False)
        shape = ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=tokenizer.vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            max_context=256,
        )
        numbers = torch.Generator().manual_seed(3)

        def weight(name: str) -> torch.Tensor:
            size = tensor_table(shape)[name].shape
            if len(size) == 1:
                return torch.ones(size)
            return torch.randn(size, generator=numbers) * (1.0 if "head" in name else 0.3)

        decoder = Decoder(shape, weight)
        return Loaded(runner_of(decoder, config, tokenizer.vocab_size), tokenizer)


@pytest.fixture
def anyio_backend() -> str:
    """One is enough: a sampler is far below the event loop."""
    return "asyncio"


@pytest.fixture
def open_tiny() -> OpenTiny:
    @asynccontextmanager
    async def opened(**config: Any) -> AsyncIterator[Engine]:
        options = {"device": "cpu", "kv_bytes": 1 << 20, "drain_timeout": 0.0, **config}
        # A machine that is busy makes no plugin slow.
        options.setdefault("sampler_timeout", 60.0)
        async with Engine(TinyModel(), **options) as engine:
            yield engine
        stats = engine.stats()
        assert stats.running == stats.waiting == stats.paused == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total

    return opened
