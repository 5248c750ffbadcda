"""`GuardedSampler`: one sampler plugin, timed and checked at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

import torch

from asyncinfer.errors import RequestFailed
from asyncinfer.plugins.supervision import Limits, PluginFault, Supervisor
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.sampling.torch_defaults import TorchDefaults
from asyncinfer.telemetry import plugin_reporter

__all__ = ["GuardedSampler", "failure"]

#: After so many calls of one method in a row that take too long, a plugin is not called again.
STRIKES: Final = 3


def failure(fault: PluginFault) -> RequestFailed:
    """The error of one request: every stream raises an object of its own."""
    failed = RequestFailed(str(fault))
    failed.__cause__ = fault.__cause__
    return failed


class GuardedSampler:
    """Calls a plugin's sampler. Every fault is a `PluginFault`; each kind is reported once.

    A call may take `timeout` seconds of the decode thread, not counting work that it queues on the
    device. After `STRIKES` calls in a row that took longer, the sampler is not called again.
    """

    def __init__(
        self,
        kind: type[SamplerPlugin],
        label: str,
        *,
        slots: int,
        vocab_size: int,
        device: torch.device,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.kind: Final = kind
        self._slots = slots
        self._vocab_size = vocab_size
        self._device = device
        self._sampler: Sampler | None = None
        #: Whether a step leaves anything for the next one.
        self._stateful = False
        #: Kept between calls: only a plugin could change this thread's default device.
        self._defaults = TorchDefaults.now()
        #: The default dtype is the process's: another thread may change it during a call, as one
        #: does that loads a model with transformers. What comes with the package does not.
        self._watched = not kind.__module__.startswith("asyncinfer.samplers.")
        self._supervisor = Supervisor(
            label,
            Limits(seconds=timeout, late=STRIKES, option="sampler_timeout"),
            consequence="it is not called any more, and its requests fail",
            report=plugin_reporter("asyncinfer.samplers"),
            clock=clock,
        )

    def join(self, slot: int, params: SamplerPlugin, saved: object) -> None:
        """A request enters the slot: a new one, or a preempted one with what `leave` returned.
        Opens the sampler for the first request."""
        sampler = self._sampler
        if sampler is None:
            sampler = self._sampler = self._open(params)
        self._call(sampler, "join", slot, params)
        if saved is not None:
            self._call(sampler, "state", check=lambda state: _restore(state, slot, saved))

    def leave(self, slot: int) -> object:
        """The request leaves the slot; returns the slot's state, for `join` after a preemption."""
        sampler = self._sampler
        assert sampler is not None
        saved = self._call(
            sampler, "state", check=lambda state: [part[slot].clone() for part in state]
        )
        self._call(sampler, "leave", slot)
        return saved

    def remember(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """The state of these slots, int64 `[n]`, for `restore`; empty if the plugin has none."""
        if not self._stateful:
            return []
        state: Sequence[torch.Tensor] = self._call(
            self._sampler, "state", check=self._checked_state
        )
        # Outside of the supervised call: running out of memory here is not the plugin's fault.
        return [part.index_select(0, slots) for part in state]

    def restore(self, slots: torch.Tensor, remembered: list[torch.Tensor]) -> None:
        """Put the state of these slots back."""

        def check(state: Sequence[torch.Tensor]) -> None:
            for part, value in zip(state, remembered, strict=True):
                part.index_copy_(0, slots, value)

        self._call(self._sampler, "state", check=check)

    def sample(
        self, step: SamplerStep, barred: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Tokens int64 `[n]` in `[0, vocab)`, with a verdict float32 `[n]` that is NaN where the
        plugin answered a token it may not; or None twice, if it changed the logits instead."""
        assert self._sampler is not None
        logits = step.logits
        shape = logits.shape

        def check(
            answer: torch.Tensor | None,
        ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            if logits.shape != shape or logits.dtype != torch.float32:
                raise self.fault("sample() changed the shape or dtype of the logits")
            return (None, None) if answer is None else self._checked(answer, logits, barred)

        sampled: tuple[torch.Tensor | None, torch.Tensor | None]
        sampled = self._call(self._sampler, "sample", step, check=check)
        return sampled

    def fault(self, what: str) -> PluginFault:
        """The error of a fault, reported if it is the first of its kind."""
        return self._supervisor.fault(what)

    def _open(self, params: SamplerPlugin) -> Sampler:
        def check(sampler: Sampler) -> Sampler:
            for name in ("join", "leave", "state", "sample"):
                if not callable(getattr(sampler, name, None)):
                    raise self.fault(f"open() gave an object that has no method {name!r}")
            return sampler

        # Without limit: a plugin may load weights and warm up.
        sampler: Sampler = self._call(
            params, "open", self._slots, self._vocab_size, self._device, check=check, seconds=inf
        )
        self._stateful = len(self._call(sampler, "state", check=self._checked_state)) > 0
        return sampler

    def _checked_state(self, state: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for part in state:
            if not isinstance(part, torch.Tensor) or part.shape[:1] != (self._slots,):
                raise self.fault(f"state() must give tensors [{self._slots}, ...] by slot")
        return state

    def _call(
        self,
        plugin: object,
        method: str,
        *args: Any,
        check: Callable[[Any], Any] | None = None,
        seconds: float | None = None,
    ) -> Any:
        supervisor = self._supervisor
        if supervisor.retired is not None:
            raise PluginFault(supervisor.retired)
        defaults = self._defaults = TorchDefaults.now(self._defaults.device)
        changed = None
        try:
            answer = supervisor.call(plugin, method, *args, check=check, seconds=seconds)
        finally:
            if self._watched:
                changed = defaults.restore()
        if changed is not None:
            raise self.fault(f"{method}() changed defaults of torch: {changed}")
        if supervisor.retired is not None:
            raise PluginFault(supervisor.retired)
        return answer

    def _checked(
        self, answer: torch.Tensor, logits: torch.Tensor, barred: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, device = len(logits), logits.device
        # A subclass could override the operators below.
        if type(answer) is not torch.Tensor:
            raise self.fault(
                f"sample() must answer None or a tensor: it gave {type(answer).__name__}"
            )
        if answer.dtype != torch.int64 or answer.shape != (count,):
            raise self.fault(
                f"sample() must answer int64, one per row: it gave {answer.dtype} "
                f"{list(answer.shape)} for {count} rows"
            )
        if answer.device != device:
            raise self.fault(f"sample() must answer on {device}: it gave {answer.device}")
        tokens = answer.clamp(0, self._vocab_size - 1)
        fine = tokens == answer
        if barred is not None:
            fine &= ~barred.gather(1, tokens[:, None])[:, 0]
        verdict = torch.zeros(count, device=tokens.device, dtype=torch.float32).masked_fill_(
            ~fine, torch.nan
        )
        return tokens, verdict


def _restore(state: Sequence[torch.Tensor], slot: int, saved: object) -> None:
    assert isinstance(saved, list)
    for part, value in zip(state, saved, strict=True):
        part[slot] = value
