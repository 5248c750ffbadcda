"""A model for tests and benchmarks that needs no weights: `Engine(FakeModel(...))`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncinfer.cache import KVGroupSpec
from asyncinfer.config import PREDICTOR, EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.scheduler import RunnerSpec, Step
from asyncinfer.testing.fake_adapters import FakeAdapters
from asyncinfer.testing.fake_model import FakeRunner
from asyncinfer.testing.fake_steps import FakeSteps, Gate
from asyncinfer.testing.oracle import EOS_ID
from asyncinfer.testing.strict_runner import StrictRunner
from asyncinfer.text import ChatTemplate, Tokenizer

__all__ = ["FakeModel"]


class FakeModel:
    """A `ModelSource` over a fake runner: a byte-level tokenizer and tokens that are hashes of
    every KV entry read. `runner` is the runner of the engine that was opened last.

    Args:
        blocks: KV blocks.
        max_context: tokens of the longest sequence.
        strict: read every KV entry (`StrictRunner`); False reads the last one only, which is
            faster for many or long rows (`FakeRunner`), but computes no drafts and no guides.
        predicts: predict what follows a draw, as `draft="mtp"` does; every fourth predicted token
            is wrong.
        eos_every, gate, failing, no_room: see `FakeSteps`.
        load_error: raised instead of loading.
        adapters: the LoRA adapters that requests may have.
        tokenizer: whose vocabulary tokens are drawn from; None is the byte-level one.
        template: chat template; None refuses chat messages.
    """

    def __init__(
        self,
        *,
        blocks: int = 1024,
        max_context: int = 4096,
        strict: bool = True,
        predicts: bool = False,
        eos_every: int | None = None,
        gate: Gate | None = None,
        failing: Callable[[Step], Mapping[int, Exception]] | None = None,
        no_room: Callable[[Step], bool] | None = None,
        load_error: BaseException | None = None,
        tokenizer: Tokenizer | None = None,
        adapters: FakeAdapters | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self.blocks = blocks
        self.max_context = max_context
        self.strict = strict
        self.predicts = predicts
        self.eos_every = eos_every
        self.gate = gate
        self.failing = failing
        self.no_room = no_room
        self.load_error = load_error
        self.tokenizer = tokenizer
        self.adapters = adapters
        self.template = template
        self.runner: FakeSteps | None = None

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        if self.load_error is not None:
            raise self.load_error
        # The runner draws every token by chance, but `EOS_ID` only when it is told to.
        tokenizer = self.tokenizer or Tokenizer.byte_level(add_bos=False, eos_id=EOS_ID)
        spec = RunnerSpec(
            groups=(KVGroupSpec(self.blocks),),
            block_size=config.block_size,
            max_slots=config.max_running,
            max_context=min(self.max_context, config.max_context or self.max_context),
            vocab_size=tokenizer.vocab_size,
            max_step_tokens=config.max_step_tokens,
            step_target=config.step_target,
            masks=True,
            drafts=self.strict,
            guides=self.strict,
            predicts=PREDICTOR if self.strict and self.predicts else "",
        )
        runner = StrictRunner if self.strict else FakeRunner
        self.runner = runner(
            spec,
            eos_every=self.eos_every,
            gate=self.gate,
            failing=self.failing,
            no_room=self.no_room,
        )
        self.runner.adapters = self.adapters
        return Loaded(self.runner, tokenizer, self.template)
