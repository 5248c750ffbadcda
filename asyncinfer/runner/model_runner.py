"""`ModelRunner`: a step's plan through the model and the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from asyncinfer.attention import KVCache
from asyncinfer.config import Graphs
from asyncinfer.models import Decoder
from asyncinfer.runner.accelerator import Accelerator
from asyncinfer.runner.deterministic_executor import DeterministicExecutor
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.graph_executor import GraphExecutor
from asyncinfer.runner.input_batch import InputBatch
from asyncinfer.runner.pending_step import PendingStep
from asyncinfer.runner.step_buffers import BufferPool, StepBuffers
from asyncinfer.sampling import SamplingState, TokenHistory
from asyncinfer.scheduler import RunnerSpec, Step, StepResult
from asyncinfer.weights import is_out_of_memory

__all__ = ["ModelRunner"]


class ModelRunner:
    """Applies what a plan changes and has its executor compute the rows; see `StepRunner` for the
    order of calls.

    Drawn tokens stay on the device, in the history that the next step reads its inputs from, so
    that a step can be launched before the one that draws its tokens is collected. `launch` does
    not wait for the device.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[KVCache],
        spec: RunnerSpec,
        *,
        sampler_timeout: float = 0.25,
        accelerator: Accelerator | None = None,
        graphs: Graphs = "lazy",
        graph_memory: int = 0,
        deterministic: bool = False,
    ) -> None:
        """
        Args:
            kv: the pages of each KV group of `spec`.
            accelerator: None on a CPU.
            graphs: when decode steps are recorded on an accelerator.
            graph_memory: bytes set aside for what a recorded step makes on its way.
            deterministic: what a request gets is the same to the last bit whatever is computed with
                it. Nothing is recorded then.
        """
        self._spec = spec
        self._decoder = decoder
        self._kv = kv
        self._accelerator = accelerator
        self._buffers = BufferPool(accelerator)
        self._history = _history(spec, decoder.device, accelerator)
        self._sampling = SamplingState(
            spec.max_slots, spec.vocab_size, self._history, sampler_timeout=sampler_timeout
        )
        state = self._history, self._sampling
        self.executor: EagerExecutor
        if deterministic:
            inputs = InputBatch(spec)
            self.executor = DeterministicExecutor(decoder, kv, inputs, *state, spec.max_context)
        elif accelerator is None or graphs == "off":
            self.executor = EagerExecutor(decoder, kv, InputBatch(spec), *state)
        else:
            recorded = GraphExecutor(accelerator, decoder, kv, spec, *state, hold=graph_memory)
            if graphs == "start":
                recorded.record_all()
            self.executor = recorded

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of how its model was loaded."""
        return self._decoder.notes

    @torch.inference_mode()
    def launch(self, plan: Step) -> object:
        """Start a step; the handle is for `collect`.

        Where the device has no memory for the step this raises `MemoryError`, either before
        anything has changed (`_reserve`) or after everything has (`_compute`).
        """
        staged: list[torch.Tensor] = []
        buffers = None
        try:
            staged, buffers = self._reserve(plan)
        except (MemoryError, RuntimeError) as error:
            reason = _no_room(error)
        self._apply(plan, staged)
        if buffers is not None:
            try:
                step = self._compute(plan, buffers)
                self._sampling.commit()
                return step
            except (MemoryError, RuntimeError) as error:
                reason = _no_room(error)
            # Only now: while the error lives, so do the tensors of every frame it came through. The
            # buffers are dropped, because nobody will wait for the copies begun into them.
            self._sampling.roll_back()
        self.executor.lost(plan)
        raise MemoryError(reason)

    def collect(self, handle: object) -> StepResult:
        """Wait for a step and give its result."""
        assert isinstance(handle, PendingStep)
        handle.buffers.wait()
        try:
            return handle.read()
        finally:
            self._buffers.give_back(handle.buffers)

    def close(self) -> None:
        """Drop everything that lives on the device and give its memory back."""
        if self._accelerator is not None:
            # torch may hand dropped memory to another thread while a step in flight uses it. A
            # device that has failed raises here once more, when nobody listens any longer.
            with suppress(RuntimeError):
                self._accelerator.drain()
        self.executor.close()
        del self.executor, self._decoder, self._kv, self._history, self._sampling, self._buffers
        if self._accelerator is not None:
            with suppress(RuntimeError):
                self._accelerator.close()

    def _reserve(self, plan: Step) -> tuple[list[torch.Tensor], StepBuffers]:
        """All memory that the plan's changes take: the tokens of each join, on the device, and
        buffers for the results."""
        self._history.reserve(max((len(join.token_ids) for join in plan.joins), default=0))
        staged = [self._history.stage(join.token_ids) for join in plan.joins]
        return staged, self._buffers.take()

    def _apply(self, plan: Step, staged: list[torch.Tensor]) -> None:
        """Make the plan's changes. `staged` holds the tokens of its joins; it is empty where there
        was no memory for them, and then nobody joins. Whoever joins a step that is taken back
        leaves with the next one, so nobody is missed."""
        joins = plan.joins if staged else []
        for slot in plan.leaves:
            self._sampling.leave(slot)
        for join, tokens in zip(joins, staged, strict=True):
            self._history.put(join.slot, tokens)
            self._sampling.join(join.slot, join)
        self.executor.change(plan, joins)

    def _compute(self, plan: Step, buffers: StepBuffers) -> PendingStep:
        for kv, changes in zip(self._kv, plan.groups, strict=False):
            kv.copy_blocks(changes.copies)
        return self.executor.run(plan, buffers)


def _history(
    spec: RunnerSpec, device: torch.device, accelerator: Accelerator | None
) -> TokenHistory:
    if accelerator is None:
        # It grows with the longest request, and so takes no more of the host than that.
        return TokenHistory(spec.max_slots, device)
    # It has one slot more, for rows that fill up a batch. It never moves: graphs are recorded over
    # it, and `memory.py` counts on its size.
    return TokenHistory(spec.max_slots + 1, device, capacity=spec.max_context + 1)


def _no_room(error: BaseException) -> str:
    """What to say of an error for memory that could not be had. Any other error is raised again."""
    if not is_out_of_memory(error):
        raise error
    return str(error) or "out of memory"
