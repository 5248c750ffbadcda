"""`IdleModel`: the real runner on a device that takes no time, for measuring what the host does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncinfer.attention import KVCache
from asyncinfer.cache import KVGroupSpec
from asyncinfer.config import EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.models import Decoder, ModelConfig, tensor_table
from asyncinfer.runner import ModelRunner
from asyncinfer.scheduler import RunnerSpec
from asyncinfer.text import Tokenizer

__all__ = ["IdleModel"]

#: As small as can be, because prompts and the first step of each kind are computed.
_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    max_context=4096,
)


class IdleModel:
    """A `ModelSource` whose decode steps are recorded, sent, replayed and fetched by the engine's
    own code, while a replay does nothing: every token is 0. On the CPU's memory.

    Args:
        blocks: KV blocks.
        max_context: tokens of the longest sequence.
    """

    def __init__(self, *, blocks: int, max_context: int = 1024) -> None:
        self.blocks = blocks
        self.max_context = max_context
        self.runner: ModelRunner | None = None

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        tokenizer = Tokenizer.byte_level(add_bos=False)
        spec = RunnerSpec(
            groups=(KVGroupSpec(self.blocks),),
            block_size=config.block_size,
            max_slots=config.max_running,
            max_context=min(self.max_context, config.max_context or self.max_context),
            vocab_size=_MODEL.vocab_size,
            max_step_tokens=config.max_step_tokens,
            samplers=True,
            overlap=config.overlap or 1,
        )
        table = tensor_table(_MODEL)
        decoder = Decoder(_MODEL, lambda name: torch.zeros(table[name].shape))
        kv = KVCache.allocate(_MODEL, spec.num_blocks, spec.block_size, torch.float32, "cpu")
        self.runner = ModelRunner(decoder, [kv], spec, accelerator=_IdleDevice())
        return Loaded(self.runner, tokenizer)


class _IdleDevice:
    """An accelerator (see `asyncinfer.runner.accelerator`) that is always done at once."""

    device = torch.device("cpu")
    main = side = None

    def adopt(self) -> None:
        pass

    @contextmanager
    def on_side(self) -> Iterator[None]:
        yield

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def event(self) -> _Nothing:
        return _Nothing()

    def capture(self, work: Callable[[], None], *, hold: int = 0) -> _Nothing:
        return _Nothing()

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Nothing:
    """An event that was reached, a graph of nothing."""

    def record(self, stream: object) -> None:
        pass

    def wait(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        pass
