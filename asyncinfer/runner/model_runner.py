"""`ModelRunner`: a step through the model and the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import KVCache, StateCache
from asyncinfer.config import Graphs
from asyncinfer.kernels.dispatch import KernelError, distrust
from asyncinfer.kernels.flashinfer import FlashInferError
from asyncinfer.models import Decoder
from asyncinfer.runner.accelerator import Accelerator, DeviceError
from asyncinfer.runner.deterministic_executor import DeterministicExecutor
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.fallbacks import Fallbacks
from asyncinfer.runner.graph_executor import GraphExecutor
from asyncinfer.runner.input_batch import InputBatch
from asyncinfer.runner.pages_ahead import PagesAhead
from asyncinfer.runner.pending_step import BufferPool, PendingStep, StepBuffers
from asyncinfer.runner.replay_executor import ReplayExecutor
from asyncinfer.runner.step_threads import StepThreads
from asyncinfer.runner.weak_call import weak_call
from asyncinfer.runtime import cancellation_check
from asyncinfer.sampling import SamplingState, TokenHistory
from asyncinfer.scheduler import RunnerSpec, Step, StepResult
from asyncinfer.stats import Fallback
from asyncinfer.weights import is_out_of_memory

__all__ = ["ModelRunner"]


class ModelRunner:
    """Applies what a step changes and has its executor compute the rows; see `StepRunner` for the
    order of calls.

    Drawn tokens stay on the device, in the history that the next step reads its inputs from. So
    one can be launched before the last is collected. `launch` does not wait for the device.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[KVCache | StateCache],
        spec: RunnerSpec,
        *,
        groups: Sequence[int] | None = None,
        sampler_timeout: float = 0.25,
        accelerator: Accelerator | None = None,
        graphs: Graphs = "lazy",
        graph_memory: int = 0,
        deterministic: bool = False,
        threads: StepThreads | None = None,
        fallbacks: Fallbacks | None = None,
        adapters: AdapterPool | None = None,
    ) -> None:
        """
        Args:
            kv: the pages of the KV groups of `spec`.
            groups: each cache's group; None: each is one, in order.
            accelerator: None on a CPU.
            graphs: when decode steps are recorded; a CPU records them when they occur, or never.
            graph_memory: bytes set aside for the intermediate tensors of a recorded step.
            deterministic: answers are the same to the last bit, whatever is computed with them.
            threads: chooses the threads of a step; None: it has the caller's number.
            fallbacks: the fallbacks known from the start.
            adapters: the LoRA adapters that requests may have; None: none.
        """
        self.spec = spec
        self.decoder = decoder
        self.kv = kv
        self._groups = groups or range(len(kv))
        self._fallbacks = fallbacks or Fallbacks()
        self._accelerator = accelerator
        self._deterministic = deterministic
        self._threads = threads
        if accelerator is None:
            self._check_cancelled = cancellation_check()
            decoder.between_layers = weak_call(self._between_layers)
        self._ahead = PagesAhead(() if accelerator else zip(self._groups, kv, strict=True))
        self._buffers = BufferPool(accelerator)
        self.history = _history(spec, decoder.device, accelerator)
        self._sampling = SamplingState(
            spec.max_slots, spec.vocab_size, self.history, sampler_timeout=sampler_timeout
        )
        #: None where requests have no adapters.
        self.adapters = adapters
        self.executor: EagerExecutor
        state, inputs = (self.history, self._sampling), InputBatch(spec)
        if deterministic:
            self.executor = DeterministicExecutor(
                decoder, kv, inputs, *state, spec.max_context, adapters
            )
        elif graphs == "off":
            self.executor = EagerExecutor(decoder, kv, inputs, *state, adapters, self._groups)
        elif accelerator is None:
            self.executor = ReplayExecutor(decoder, kv, spec, *state, adapters, self._groups)
        else:
            self.executor = recorded = GraphExecutor(
                *(accelerator, decoder, kv, spec, *state, adapters, groups),
                hold=graph_memory,
                fallbacks=self._fallbacks,
            )
            if graphs == "start":
                recorded.record_all()

    @property
    def architecture(self) -> str:
        """The model's, as its configuration names it."""
        return self.decoder.config.architecture

    @property
    def dtype(self) -> str:
        """What the model computes in, such as "float32"."""
        return str(self.decoder.dtype).removeprefix("torch.")

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks about how the model was loaded and is computed."""
        return (*self.decoder.notes, *map(str, self._fallbacks.found))

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """What of the GPU path it goes without, for any thread."""
        return self._fallbacks.found

    @torch.inference_mode()
    def launch(self, step: Step) -> object:
        """Start a step; the handle is for `collect`.

        Where the device has no memory for the step this raises `MemoryError`, either before
        anything has changed (`_reserve`) or after everything has (`_compute`).
        """
        if self._threads is not None:
            self._threads.adapt(helps=self.executor.helps)
        self.executor.settle(step)
        staged: list[torch.Tensor] = []
        buffers = None
        try:
            staged, buffers = self._reserve(step)
        except (MemoryError, RuntimeError) as error:
            reason = self._no_room(error)
        self._apply(step, staged)
        if buffers is not None:
            try:
                pending = self._compute(step, buffers)
                self._sampling.commit()
                return pending
            except (MemoryError, RuntimeError) as error:
                reason = self._no_room(error)
            # After the `except`, whose error keeps the tensors of every frame it came through. The
            # buffers are dropped, because nobody will wait for the copies begun into them.
            self._sampling.roll_back()
        self._buffers.lost()
        self.executor.lost(step)
        raise MemoryError(reason)

    def collect(self, handle: object) -> StepResult:
        """Wait for a step and give its result."""
        assert isinstance(handle, PendingStep)
        try:
            handle.buffers.wait()
        except RuntimeError as error:
            raise DeviceError(error) from error
        try:
            return handle.result()
        finally:
            self._buffers.give_back(handle.buffers)

    def prepare(self) -> bool:
        """See `StepRunner`."""
        return self._ahead.provide()

    def distrust(self, fault: str) -> None:
        """Go on with torch's operators in place of Triton's kernels. Raises `DeviceError` where the
        device has failed."""
        self._wait_for_device()
        distrust(fault)
        self._fallbacks.add("kernels", fault)
        self.stop_replaying("Triton's kernels are in them")

    def leave_flashinfer(self, fault: str) -> bool:
        """Leave FlashInfer for our own kernels; False if that was done. Raises as `distrust`."""
        caches = [kv for kv in self.kv if isinstance(kv, KVCache) and kv.flashinfer is not None]
        if not caches:
            return False
        self._wait_for_device()
        for kv in caches:
            kv.flashinfer = None
        self._fallbacks.add("attention", fault)
        return True

    def stop_replaying(self, fault: str) -> None:
        """Go on without recorded steps. Raises as `distrust` does."""
        # The steps in flight end first: their graphs and buffers are theirs until then.
        self._wait_for_device()
        if self.executor.stop_replaying():
            self._fallbacks.add("graphs", fault)

    def close(self) -> None:
        """Drop everything that lives on the device and give its memory back."""
        if self._accelerator is not None:
            # torch may hand dropped memory to another thread while a step in flight uses it. A
            # device that has failed raises here once more, when nobody listens any longer.
            with suppress(RuntimeError):
                self._accelerator.drain()
        self.executor.close()
        self.adapters = None
        del self.executor, self.decoder, self.kv, self.history, self._sampling
        del self._buffers, self._ahead
        if self._accelerator is not None:
            with suppress(RuntimeError):
                self._accelerator.close()

    def _between_layers(self) -> None:
        """A long prompt takes seconds: programs come and go meanwhile, and this one may end."""
        self._check_cancelled()
        if self._threads is not None:
            self._threads.adapt(helps=self.executor.helps)

    def _reserve(self, step: Step) -> tuple[list[torch.Tensor], StepBuffers]:
        """All memory that the step's changes take: the tokens of each join, those forced and those
        drafted, on the device; and buffers for the results. Raises torch's error where there is
        none."""
        ends = [len(join.token_ids) for join in step.joins]
        ends += [forced.start + len(forced.token_ids) for forced in step.forced]
        ends += [step.first_draw(row) + len(draft) for row, draft in step.drafts.items()]
        self.history.reserve(max(ends, default=0))
        told = [*(join.token_ids for join in step.joins), *(f.token_ids for f in step.forced)]
        told += step.drafts.values()
        return [self.history.stage(tokens) for tokens in told], self._buffers.take()

    def _apply(self, step: Step, staged: list[torch.Tensor]) -> None:
        """Make the step's changes. `staged` is of `_reserve`. Where that had no memory it is empty,
        and no slot is joined: the step is taken back, and the next one leaves the slots that were
        to join or had tokens forced."""
        joins, forced, drafts = (step.joins, step.forced, step.drafts) if staged else ([], [], {})
        for slot in step.leaves:
            self._sampling.leave(slot)
        for each, tokens in zip(forced, staged[len(joins) :], strict=False):
            self.history.put(each.slot, tokens, each.start)
        for row, tokens in zip(drafts, staged[len(joins) + len(forced) :], strict=True):
            self.history.put(step.slots[row], tokens, step.first_draw(row))
        for join, tokens in zip(joins, staged, strict=False):
            self.history.put(join.slot, tokens)
            self._sampling.join(join.slot, join)
        self.executor.change(step, joins)
        self._ahead.used(step.groups)

    def _compute(self, step: Step, buffers: StepBuffers) -> PendingStep:
        for number, kv in zip(self._groups, self.kv, strict=True):
            if step.groups:
                kv.copy_blocks(step.groups[number].copies)
        try:
            return self.executor.run(step, buffers)
        except KernelError as error:
            if self._deterministic:
                # Torch's operators would give other bits from here on.
                raise
            fault, of_flashinfer = str(error), isinstance(error, FlashInferError)
        # After the `except`, as in `launch`.
        if not (of_flashinfer and self.leave_flashinfer(fault)):
            self.distrust(fault)
        self._sampling.roll_back()
        self.executor.lost(step)
        return self.executor.run(step, buffers)

    def _wait_for_device(self) -> None:
        """Wait for all work of the device. Raises `DeviceError` where it has failed."""
        if self._accelerator is not None:
            try:
                self._accelerator.drain()
            except RuntimeError as error:
                raise DeviceError(error) from error

    def _no_room(self, error: BaseException) -> str:
        """What to say of an error for memory that could not be had. Any other error is raised
        again, as a `DeviceError` where the device has failed."""
        if is_out_of_memory(error):
            return str(error) or "out of memory"
        if not isinstance(error, DeviceError):
            self._wait_for_device()
        try:
            raise error
        finally:
            # The error's traceback refers to this frame.
            del error


def _history(
    spec: RunnerSpec, device: torch.device, accelerator: Accelerator | None
) -> TokenHistory:
    if accelerator is None:
        # It grows with the longest request, and so takes no more of the host than that.
        return TokenHistory(spec.max_slots, device, here=True)
    # One slot more is for rows that fill up a batch. Graphs are recorded over it: it never moves.
    return TokenHistory(spec.max_slots + 1, device, capacity=spec.max_context + 1)
