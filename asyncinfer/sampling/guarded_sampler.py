"""`GuardedSampler`: one sampler plugin, timed and checked at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import torch

from asyncinfer.errors import PluginError, RequestFailed
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.telemetry import emit

__all__ = ["GuardedSampler", "PluginFault"]

T = TypeVar("T")

GROUP: Final = "asyncinfer.samplers"
#: Calls in a row that took too long before a plugin is called no more.
STRIKES: Final = 3


class PluginFault(Exception):
    """A plugin raised or answered nonsense; `str()` names it."""

    def failure(self) -> RequestFailed:
        """A request's own error: every stream raises its own object."""
        failed = RequestFailed(str(self))
        failed.__cause__ = self.__cause__
        return failed


class GuardedSampler:
    """Calls a plugin's sampler. Every fault is a `PluginFault`; each kind is reported once.

    A call that takes more than `timeout` seconds of the decode thread is a strike (what it leaves
    to the device is not in it); `STRIKES` in a row, and the sampler is not called again.
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
        self.label: Final = label
        self._slots = slots
        self._vocab_size = vocab_size
        self._device = device
        self._timeout = timeout
        self._clock = clock
        self._sampler: Sampler | None = None
        self._strikes = 0
        self._reported: set[str] = set()

    def join(self, slot: int, params: SamplerPlugin, saved: object) -> None:
        """A new tenant, or one who comes back with what `leave` gave. Opens the sampler if this
        is its first."""
        sampler = self._sampler
        if sampler is None:
            # Loading and warming up may take its time.
            sampler = self._sampler = self._guard("open", lambda: self._open(params))
        self._timed("join", lambda: sampler.join(slot, params))
        if saved is not None:
            self._guard("state", lambda: self._restore(sampler, slot, saved))

    def leave(self, slot: int) -> object:
        """The tenant is gone; gives the slot's state, for its return."""
        sampler = self._sampler
        assert sampler is not None
        saved = self._guard("state", lambda: [part[slot].clone() for part in sampler.state()])
        self._timed("leave", lambda: sampler.leave(slot))
        return saved

    def sample(
        self, step: SamplerStep, barred: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Tokens int64 `[n]` in `[0, vocab)` with a verdict float32 `[n]`, NaN where the answer
        was another; or None twice, if the logits were changed instead."""
        sampler = self._sampler
        assert sampler is not None
        shape = step.logits.shape
        answer = self._timed("sample", lambda: sampler.sample(step))
        if answer is None:
            if step.logits.shape != shape or step.logits.dtype != torch.float32:
                raise self.fault("sample() changed the shape or dtype of the logits")
            return None, None
        return self._guard("sample", lambda: self._checked(answer, step, barred))

    def fault(self, what: str, cause: BaseException | None = None) -> PluginFault:
        """A fault of this plugin's, reported if it is the first of its kind."""
        fault = PluginFault(f"{self.label}: {what}")
        fault.__cause__ = cause
        kind = what.partition(":")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            emit("plugin_failed", group=GROUP, error=str(fault))
        return fault

    def _open(self, params: SamplerPlugin) -> Sampler:
        sampler = params.open(self._slots, self._vocab_size, self._device)
        for name in ("join", "leave", "state", "sample"):
            if not callable(getattr(sampler, name, None)):
                raise PluginError(f"open() gave {sampler!r}, which has no method {name!r}")
        for part in sampler.state():
            if not isinstance(part, torch.Tensor) or part.shape[:1] != (self._slots,):
                raise PluginError(f"state() must give tensors [{self._slots}, ...] by slot")
        return sampler

    @staticmethod
    def _restore(sampler: Sampler, slot: int, saved: object) -> None:
        assert isinstance(saved, list)
        for part, value in zip(sampler.state(), saved, strict=True):
            part[slot] = value

    def _checked(
        self, answer: torch.Tensor, step: SamplerStep, barred: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(step.slots)
        if not isinstance(answer, torch.Tensor):
            raise self.fault(
                f"sample() must answer None or a tensor: it gave {type(answer).__name__}"
            )
        if answer.dtype != torch.int64 or answer.shape != (count,):
            raise self.fault(
                f"sample() must answer int64, one per row: it gave {answer.dtype} "
                f"{list(answer.shape)} for {count} rows"
            )
        if answer.device != step.slots.device:
            raise self.fault(
                f"sample() must answer on {step.slots.device}: it gave {answer.device}"
            )
        tokens = answer.clamp(0, self._vocab_size - 1)
        fine = tokens == answer
        if barred is not None:
            fine &= ~barred.gather(1, tokens[:, None])[:, 0]
        verdict = torch.zeros(count, device=tokens.device).masked_fill_(~fine, torch.nan)
        return tokens, verdict

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        if self._strikes >= STRIKES:
            raise self._quarantine()
        began = self._clock()
        result = self._guard(name, call)
        spent = self._clock() - began
        if spent <= self._timeout:
            self._strikes = 0
            return result
        self._strikes += 1
        late = self.fault(f"is too slow: {name}() took {spent:.3g} s")
        if self._strikes < STRIKES:
            return result
        raise self._quarantine() from late

    def _quarantine(self) -> PluginFault:
        return self.fault(
            f"is not called any more: {STRIKES} calls in a row took more than "
            f"sampler_timeout={self._timeout:g} s"
        )

    def _guard(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except PluginFault:
            raise
        # A plugin that leaves by sys.exit() must not end the host.
        except (Exception, SystemExit) as error:
            raise self.fault(f"{name}() raised: {error!r}", error) from error
